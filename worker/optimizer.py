"""DistributedOptimizer: the given optimizer, whose step() uses the mean of all ranks' gradients.

The optimizer stays the object it was: its class becomes a subclass of itself, so isinstance checks,
schedulers made before or after, param_groups, state and state_dict are the inner optimizer's own
(C05, C56). Two traps are handled here. A scheduler made before wrapping has put its own ``step`` on
the instance, which would bypass ours. And GradScaler looks for infinities in ``param_groups``
before it steps: reading the list from there synchronizes first, so that all ranks see the same mean
and agree about skipping (C02).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch

from gradsum.errors import UsageError
from gradsum.worker.client import Client
from gradsum.worker.compression import Compressor, require_compressor
from gradsum.worker.crossing import Crossing, Group
from gradsum.worker.gradients import Gradients
from gradsum.worker.marks import marked
from gradsum.worker.naming import Naming
from gradsum.worker.order import ForwardOrder
from gradsum.worker.readers import Readers

_SCALER = "torch.amp.grad_scaler"
_log = logging.getLogger("gradsum.worker")


class Distributed(torch.optim.Optimizer):
    """What wrapping adds to an optimizer's class."""

    _gradients: Gradients
    _inner_step: Callable[..., Any] | None
    _skipping: bool
    _crossing: Crossing | None
    _told: bool
    _opt_called: bool

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's list. Read by a GradScaler, it holds summed gradients."""
        if sys._getframe(1).f_globals.get("__name__") == _SCALER:
            self._synchronize_once()
        return cast(list[dict[str, Any]], self.__dict__["param_groups"])

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Wait for the mean gradients, then make the inner optimizer's step.

        With a closure: its gradients are summed after each call of it, its loss stays local (C95).
        With ``cross_barrier`` each parameter's step is made when a forward pass needs it.
        """
        self._opt_called = True
        self.settle()
        if self._may_cross(closure):
            groups = self.__dict__["param_groups"]
            self._crossing.begin(self._gradients.leave(groups), groups)  # type: ignore[union-attr]
            self._gradients.stepped()
            return None
        inner = self._inner_step or super().step
        if closure is not None:
            result = inner(self._summing(closure), *args, **kwargs)
        else:
            if not self._skipping:
                self._synchronize_once()
            elif self._gradients.touched:
                raise UsageError(
                    "step() inside skip_synchronize(), but gradients are not summed",
                    hint="call optimizer.synchronize() after backward(), before step()",
                )
            result = inner(*args, **kwargs)
        self._gradients.stepped()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the inner step runs the step hooks
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # step sets _opt_called itself

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; those of a backward without step() are thrown away (C25)."""
        if self._gradients.touched:
            self.settle()
        self._gradients.discard(self.__dict__["param_groups"])
        if self._crossing is not None:
            self._crossing.cleared(set_to_none)
        super().zero_grad(set_to_none)
        self._gradients.remember()

    @marked("gradsum::synchronize")
    def synchronize(self) -> None:
        """End the window: wait until every gradient is the mean over the ranks."""
        self.settle()
        self._gradients.close(self.__dict__["param_groups"])

    @property
    def windows(self) -> int:
        """Windows closed so far, the same number on all ranks that are not behind."""
        return self._gradients.windows

    def flush(self) -> None:
        """End the window if a hook fired since the last close, and make all steps that are due:
        parameters hold afterwards what they would hold without ``cross_barrier``."""
        if self._gradients.touched:
            self.synchronize()
        self.settle()

    def settle(self) -> None:
        """Make all steps that are due (``cross_barrier``)."""
        if self._crossing is not None:
            self._crossing.settle()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, after all steps that are due."""
        self.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Steps that are due are made before."""
        self.settle()
        super().load_state_dict(state_dict)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` inside does not synchronize: for use after ``synchronize()``."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients accumulated inside are not pushed yet. What counts is where backward() runs."""
        with self._gradients.no_sync():
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Another number of backward passes per step(); the next window is learnt anew."""
        self._gradients.relearn(_require_passes(passes))

    def _synchronize_once(self) -> None:
        if not self._gradients.synchronized:
            self.synchronize()

    def _may_cross(self, closure: object) -> bool:
        """Whether this step may be made piece by piece; why not is said once."""
        if self._crossing is None:
            return False
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        reasons = {
            "a closure": closure is not None,
            "clipping or scaling of the whole gradient": self._gradients.synchronized,
            "skip_synchronize()": self._skipping,
            "a step of its own on the optimizer": self._inner_step is not None,
            "hooks on the optimizer's step": any(self.__dict__.get(name) for name in hooks),
        }
        reason = next((text for text, holds in reasons.items() if holds), None)
        if reason is not None and not self._told:
            self._told = True
            _log.warning("cross_barrier: steps wait for all sums, because of %s", reason)
        return reason is None

    def _make(self, groups: list[Group]) -> None:
        """The inner optimizer's step over these groups, whatever mode the caller is in."""
        inner: Any = type(self).__mro__[2].step  # type: ignore[attr-defined]
        if getattr(inner, "hooked", False):  # torch's wrapper, which runs hooks and marks profiles
            inner = inner.__wrapped__
        kept = self.__dict__["param_groups"]
        kinds = {p.device.type for group in groups for p in group["params"]}
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
            for kind in kinds:
                if torch.is_autocast_enabled(kind):
                    modes.enter_context(torch.autocast(kind, enabled=False))
            self.__dict__["param_groups"] = groups
            try:
                inner(self)
            finally:
                self.__dict__["param_groups"] = kept

    def _summing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return call

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain optimizers: a copy is no member of the job."""
        self.settle()
        return _bare, (type(self).__mro__[2],), self.__getstate__()


def _bare(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An optimizer without content, for copies and pickles."""
    return kind.__new__(kind)


def wrap(
    client: Client,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor | None = None,
    backward_passes_per_step: int = 1,
    *,
    model: torch.nn.Module | None = None,
    cross_barrier: bool = False,
    average: bool = True,
) -> Distributed:
    """Make ``optimizer`` a Distributed one, in place. Blocks until every rank has wrapped it.

    average: False leaves sums where means would be.
    """
    client.session.check()
    _require_wrappable(optimizer)
    compressor = require_compressor(compression)
    passes = _require_passes(backward_passes_per_step)
    naming = Naming(optimizer.param_groups, named_parameters, model)
    crossing: Crossing | None = None
    order: ForwardOrder | None = None
    if cross_barrier:
        crossing = Crossing(_maker(optimizer))
        order = Readers(_require_model(model), crossing.need, crossing.settle)
    elif model is not None:
        order = ForwardOrder(model)
    gradients = Gradients(client, naming, compressor, passes, order, average=average)
    gradients.adopt(optimizer.param_groups)
    base = type(optimizer)
    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    patched = optimizer.__dict__.pop("step", None)
    if hasattr(patched, "_wrapped_by_lr_sched"):
        patched = None
    optimizer.__class__ = type(base.__name__, (Distributed, base), body)
    wrapped = cast(Distributed, optimizer)
    wrapped._gradients = gradients
    wrapped._inner_step = patched
    wrapped._skipping = False
    wrapped._crossing = crossing
    wrapped._told = False
    client.keep(wrapped)
    return wrapped


def _maker(optimizer: torch.optim.Optimizer) -> Callable[[list[Group]], None]:
    """The optimizer's own step over some groups; does not keep it alive."""
    alive = weakref.ref(cast(Distributed, optimizer))

    def make(groups: list[Group]) -> None:
        wrapped = alive()
        if wrapped is not None:
            wrapped._make(groups)

    return make


def _require_model(model: torch.nn.Module | None) -> torch.nn.Module:
    if model is None:
        raise UsageError(
            "cross_barrier=True needs the model: its forward pass waits for late updates",
            hint="pass model=, or leave cross_barrier=False",
        )
    return model


def _require_wrappable(optimizer: object) -> None:
    if isinstance(optimizer, Distributed):
        raise UsageError("the optimizer is wrapped already", hint="wrap each optimizer once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS cannot be distributed: its line search decides by each rank's own loss, so "
            "ranks would make different numbers of steps; use SGD or Adam"
        )


def _require_passes(passes: object) -> int:
    if not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step={passes!r}: a whole number from 1 on")
    return passes
