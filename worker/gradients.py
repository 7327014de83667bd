"""The gradients of one wrapped optimizer: when they leave, and what the end of a window does.

Rules: a gradient leaves in the hook that completes it, or at the end of the window; what did not
fire is ABSENT (V5); gradients set by hand count as fired; a gradient whose sum is on the way is not
touched (V4). All tensors of an optimizer share one packing group and one window number (V1).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from gradsum.errors import UsageError
from gradsum.scheduler.policy import Policy
from gradsum.worker.client import Client
from gradsum.worker.compression import Compressor
from gradsum.worker.marks import marked
from gradsum.worker.naming import Naming
from gradsum.worker.order import ForwardOrder
from gradsum.worker.parameters import Round, Tracked
from gradsum.worker.rounds import Sink
from gradsum.worker.sinks import Discard, TensorSink
from gradsum.worker.tensors import SUMMED, dtype_name, source_bytes, spec_of
from gradsum.worker.window import Lesson, Verdict, Window


class Gradients:
    """All gradients of one optimizer. Raises what ended a round; waits obey stall_timeout."""

    def __init__(
        self,
        client: Client,
        naming: Naming,
        compressor: Compressor,
        passes: int,
        order: ForwardOrder | None,
        *,
        average: bool = True,
    ) -> None:
        self._average = average
        self._session = client.session
        self._naming = naming
        self._compressor = compressor
        self._order = order
        self._window = Window(passes)
        self._tracked: list[Tracked] = []
        self._index: dict[str, int] = {}
        self._urgency: dict[int, int] = {}
        self._flight: list[Round] = []
        self._held = 0
        self.group = client.session.next_group()

    # -- parameters --------------------------------------------------------------------------

    def adopt(self, groups: list[dict[str, Any]]) -> None:
        """Register parameters that are new in ``groups`` and hook those that need a gradient now.

        Frozen ones take part as ABSENT (V3). A parameter in another's place takes its key (C68).
        """
        fresh = [(n, p) for n, p in self._naming.fresh(groups) if p.dtype in SUMMED]
        policy = Policy(pack=self.group)
        specs = [
            spec_of(f"{self.group}/{name}", p, policy, self._window.version, self._wire(p))
            for name, p in fresh
        ]
        new = [spec for spec in specs if spec.name not in self._index]
        part = self.group if not self._tracked else f"{self.group}+{len(self._tracked)}"
        keys = dict(
            zip((s.name for s in new), self._session.register(new, part), strict=True)
            if new
            else ()
        )
        for spec, (_, parameter) in zip(specs, fresh, strict=True):
            if spec.name in keys:
                self._index[spec.name] = len(self._tracked)
                self._tracked.append(Tracked(parameter, spec, keys[spec.name]))
            else:
                self._replace(self._tracked[self._index[spec.name]], parameter, spec.shape)
        self._window.grow(len(new))
        self._hook()

    def _replace(self, tracked: Tracked, parameter: torch.Tensor, shape: tuple[int, ...]) -> None:
        if shape != tracked.spec.shape or SUMMED[parameter.dtype][0] != tracked.spec.dtype:
            raise UsageError(
                f"parameter {tracked.spec.name!r} was replaced by one of another shape or dtype",
                tensor=tracked.spec.name,
                hint="make a new optimizer and wrap it",
            )
        tracked.unhook()
        tracked.parameter = parameter

    def _wire(self, parameter: torch.Tensor) -> str | None:
        wire = self._compressor.wire_for(parameter)
        return dtype_name(wire) if wire is not None else None

    def _hook(self) -> None:
        myself = weakref.ref(self)
        for index, tracked in enumerate(self._tracked):
            tracked.hook(partial(_guarded, myself, index), partial(_fired, myself, index))

    # -- backward ----------------------------------------------------------------------------

    def guard(self, index: int) -> None:
        """Before accumulation: UsageError if the gradient is on its way already (V4)."""
        if self._tracked[index].awaited:
            name = self._tracked[index].spec.name
            raise UsageError(
                f"{name!r} was used before its last step() had been made (cross_barrier=True)",
                tensor=name,
                hint="call optimizer.flush() before a parameter is used outside the model's "
                "modules, or where the first step did not use it",
            )
        if self._window.is_sent(index):
            name = self._tracked[index].spec.name
            raise UsageError(
                f"a further backward pass reached {name!r}, whose gradient is on its way already",
                tensor=name,
                hint="pass backward_passes_per_step=N for N backward passes before each step(), "
                "call optimizer.zero_grad() to throw gradients away, "
                "or use optimizer.no_sync() around all but the last",
            )

    def fired(self, index: int) -> None:
        """After accumulation: push the gradient if it is complete."""
        if self._window.untaught:
            self._learn()
        if self._window.fire(index, held=self._held > 0):
            self._check(index)
            self._push(index, self._window.version)
            self._window.sent(index)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients that are accumulated inside stay here, whenever the block was entered."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    # -- the end of a window -----------------------------------------------------------------

    @property
    def windows(self) -> int:
        """Windows closed so far."""
        return self._window.version - 1

    @property
    def touched(self) -> bool:
        """Whether a hook fired since the last close."""
        return self._window.touched

    @property
    def synchronized(self) -> bool:
        """Whether the window was closed and no hook fired since."""
        return self._window.synchronized

    def close(self, groups: list[dict[str, Any]]) -> None:
        """End the window and wait for its sums: gradients are means over the ranks afterwards."""
        for round_ in self.leave(groups):
            if round_.wait():
                round_.finish()
        self.remember()

    def leave(self, groups: list[dict[str, Any]]) -> list[Round]:
        """End the window; its rounds, which are on their way."""
        self._session.check()
        self.adopt(groups)
        self._naming.require_current()
        push = self._complete()
        lesson = self._window.lesson()
        verdict = self._window.close(push)
        for index in verdict.push:
            self._push(index, verdict.version)
        self._declare_absent(verdict, wanted=True)
        self._study(lesson)
        return self._landed()

    def _complete(self) -> list[int]:
        """What is to leave at the end of the window, checked: no error comes after the first."""
        by_hand = [i for i, tracked in enumerate(self._tracked) if tracked.by_hand()]
        push = [i for i in self._window.unsent(by_hand) if self._tracked[i].has_grad()]
        for index in push:
            self._check(index)
        return push

    def discard(self, groups: list[dict[str, Any]]) -> None:
        """``zero_grad``: end a window in which a hook fired, and throw its sums away (V1)."""
        if self._window.touched:
            self._session.check()
            self.adopt(groups)
            lesson = self._window.lesson()
            self._declare_absent(self._window.close([]), wanted=False)
            self._study(lesson)
            for round_ in self._landed():
                if round_.grad is not None:
                    round_.wait()
        self._window.synchronized = False

    def stepped(self) -> None:
        """``step`` is over: the next one closes its own window."""
        self._window.synchronized = False
        self.remember()
        self._session.mark_step()

    def remember(self) -> None:
        """Gradients as they are now are old."""
        for tracked in self._tracked:
            tracked.remember()

    def relearn(self, passes: int) -> None:
        """Another number of backward passes per step, from the next window on."""
        if self._window.touched:
            raise UsageError(
                "backward_passes_per_step cannot change between backward() and step()",
                hint="call it right after step()",
            )
        self._window.relearn(passes)

    # -- rounds ------------------------------------------------------------------------------

    def _check(self, index: int) -> None:
        if self._session.settings.nan_guard:
            self._tracked[index].require_finite(self._session.rank)

    @marked("gradsum::push")
    def _push(self, index: int, version: int) -> None:
        tracked = self._tracked[index]
        grad = tracked.dense_grad()
        session = self._session
        if session.sharing and session.settings.share_gradients and (
            tracked.spec.nbytes >= session.pack_bytes  # smaller ones are packed, a copy anyway
        ):
            grad = tracked.shared_grad(session.buffer)
        sink = TensorSink(grad, tracked.spec.wire, average=self._average)
        source = source_bytes(grad, tracked.spec)
        self._submit(index, version, source, sink, grad)

    def _declare_absent(self, verdict: Verdict, *, wanted: bool) -> None:
        for index in verdict.absent:
            tracked = self._tracked[index]
            sink = TensorSink(tracked.empty_grad, tracked.spec.wire, average=self._average)
            self._submit(index, verdict.version, None, sink if wanted else None, None)

    def _submit(
        self,
        index: int,
        version: int,
        source: memoryview | None,
        sink: TensorSink | None,
        grad: torch.Tensor | None,
    ) -> None:
        tracked = self._tracked[index]
        taker: Sink = sink or Discard()
        urgency = self._urgency.get(index, index)
        handle = self._session.submit(tracked.key, version, source, taker, urgency)
        self._flight.append(Round(tracked, handle, sink, grad, urgency))

    def _landed(self) -> list[Round]:
        rounds, self._flight = self._flight, []
        return rounds

    # -- what window 1 teaches ---------------------------------------------------------------

    def _study(self, lesson: Lesson | None) -> None:
        """Tell the others what window 1 showed."""
        if lesson is None:
            return
        keys = [tracked.key for tracked in self._tracked]
        counts = {keys[i]: count for i, count in lesson.counts.items()}
        self._session.report_window(self.group, counts, [keys[i] for i in lesson.order])
        self._urgency = self._urgencies(lesson.order)

    def _learn(self) -> None:
        """Once all ranks have told, pushes may start early."""
        merged = self._session.firings(self.group)
        if merged is not None:
            here = {tracked.key: i for i, tracked in enumerate(self._tracked)}
            self._window.learn({here[key]: n for key, n in merged.items() if key in here})

    def _urgencies(self, ready: list[int]) -> dict[int, int]:
        """Forward order if a model taught it, else the reverse of the hooks' order."""
        if self._order is None:
            return {index: place for place, index in enumerate(reversed(ready))}
        self._order.end()
        places = [self._order.position(tracked.parameter) for tracked in self._tracked]
        return {i: len(places) if place is None else place for i, place in enumerate(places)}


def _guarded(gradients: weakref.ref[Gradients], index: int) -> None:
    alive = gradients()
    if alive is not None:
        alive.guard(index)


def _fired(gradients: weakref.ref[Gradients], index: int) -> None:
    alive = gradients()
    if alive is not None:
        alive.fired(index)
