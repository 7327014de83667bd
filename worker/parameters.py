"""One parameter of a wrapped optimizer, and its part in a round.

Rule: what decides whether a gradient is new is the gradient itself, object and version counter, so
that gradients set by hand are pushed and stale ones are not (V5).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gradsum.errors import NonFinite, UsageError
from gradsum.scheduler.table import TensorSpec
from gradsum.worker.face import Handle
from gradsum.worker.marks import marked
from gradsum.worker.sinks import TensorSink
from gradsum.worker.tensors import Watch, in_place

_log = logging.getLogger("gradsum.worker")


class Tracked:
    """A parameter, its key, its hooks and the gradient seen at the last close."""

    def __init__(self, parameter: torch.Tensor, spec: TensorSpec, key: int) -> None:
        self.parameter = parameter
        self.spec = spec
        self.key = key
        self.awaited = False
        """Whether its step of the last window is still to be made (cross-barrier)."""
        self._hooks: list[Any] = []
        self._shared: torch.Tensor | None = None
        self._seen: weakref.ref[torch.Tensor] | None = None
        self._version = -1
        self._noticed = False

    def hook(self, guard: Callable[[], None], fired: Callable[[], None]) -> None:
        """Call ``guard`` before a gradient is accumulated and ``fired`` after, from now on.

        Does nothing for a frozen parameter, or one that has its hooks.
        """
        if self._hooks or not self.parameter.requires_grad:
            return
        parameter: Any = self.parameter  # torch leaves these two methods untyped
        self._hooks = [
            parameter.register_hook(lambda _grad: guard()),
            parameter.register_post_accumulate_grad_hook(lambda _parameter: fired()),
        ]

    def unhook(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def remember(self) -> None:
        """The gradient is old as it is now: only a change makes it count as set by hand."""
        grad = self.parameter.grad
        self._seen = None if grad is None else weakref.ref(grad)
        self._version = -1 if grad is None else grad._version

    def by_hand(self) -> bool:
        """Whether the gradient was set or changed since ``remember``."""
        grad = self.parameter.grad
        if grad is None:
            return False
        return self._seen is None or self._seen() is not grad or self._version != grad._version

    def has_grad(self) -> bool:
        """False also when it was accumulated and cleared again behind the optimizer's back."""
        return self.parameter.grad is not None

    def dense_grad(self) -> torch.Tensor:
        """The gradient to push; a sparse one is replaced by its dense form, with one notice."""
        grad = self.parameter.grad
        if grad is None:
            raise UsageError(f"gradient of {self.spec.name!r} is gone", tensor=self.spec.name)
        if grad.layout != torch.strided:
            if not self._noticed:
                _log.warning(
                    "gradient of %r is sparse and travels dense: %d bytes a step",
                    self.spec.name,
                    self.spec.nbytes,
                )
                self._noticed = True
            grad = grad.to_dense()
            self.parameter.grad = grad
        return grad

    def shared_grad(self, allocate: Callable[[int], memoryview]) -> torch.Tensor:
        """The gradient in memory that servers of this host read; it takes the place of one that
        lies elsewhere, and stays as long as the user keeps it between steps."""
        grad = self.dense_grad()
        if grad is self._shared or not in_place(grad.data) or self.spec.wire != self.spec.dtype:
            return grad
        if self._shared is None:
            memory = allocate(self.spec.nbytes)
            self._shared = torch.frombuffer(memory, dtype=grad.dtype).view(grad.shape)
        with torch.no_grad():
            self._shared.copy_(grad)
        self.parameter.grad = self._shared
        return self._shared

    def require_finite(self, rank: int) -> None:
        """NonFinite if the gradient holds an infinity or a NaN."""
        grad = self.dense_grad()
        bad = int((~torch.isfinite(grad)).sum())
        if bad:
            raise NonFinite(
                f"gradient of {self.spec.name!r} on rank {rank} has {bad} values of "
                f"{grad.numel()} that are not finite",
                tensor=self.spec.name,
                peer=f"rank {rank}",
                hint="look at this rank's batch and loss, or lower the learning rate",
            )

    def empty_grad(self) -> torch.Tensor:
        """Zeros in the parameter's layout, for a gradient that only other ranks have."""
        return torch.zeros_like(self.parameter, memory_format=torch.preserve_format)

    def take(self, mean: torch.Tensor) -> None:
        """Make ``mean`` the gradient; one that is there keeps its memory."""
        grad = self.parameter.grad
        if grad is mean:
            return
        if grad is None or grad.layout != torch.strided:
            self.parameter.grad = mean
        else:
            with torch.no_grad():
                grad.copy_(mean)


class Round:
    """One tensor's part in a window."""

    __slots__ = ("_handle", "_sink", "_watch", "grad", "tracked", "urgency")

    def __init__(
        self, tracked: Tracked, handle: Handle, sink: TensorSink | None,
        grad: torch.Tensor | None, urgency: int,
    ) -> None:  # fmt: skip
        self.tracked = tracked
        self.grad = grad  # None: this rank was absent
        self.urgency = urgency
        self._handle = handle
        self._sink = sink
        self._watch = None if grad is None else Watch(grad)

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self._handle.done()

    @marked("gradsum::wait")
    def wait(self) -> bool:
        """Whether anybody gave a gradient; raises what ended the round."""
        return self._handle.wait().present

    def finish(self) -> None:
        """Make the mean the gradient, after ``wait``; UsageError if the pushed one changed (V4)."""
        if self._watch is not None:
            self._watch.require_same(self.tracked.parameter.grad, self.tracked.spec.name)
        if self._sink is not None:
            self.tracked.take(self._sink.finish())

    def mean(self) -> torch.Tensor:
        """The mean, after ``wait``, wherever the user has the gradient now; UsageError if the
        pushed one was written to (V4)."""
        if self._watch is not None:
            self._watch.require_same(self.grad, self.tracked.spec.name)
        if self._sink is None:
            raise UsageError(
                f"the sum of {self.tracked.spec.name!r} was thrown away",
                tensor=self.tracked.spec.name,
            )
        return self._sink.finish()
