"""Timeline: what a shard's frames tell the trace.

It looks at what passes between the sockets and the engine and changes nothing. A contribution is
``add`` from its arrival until the engine has dealt with it, a slice is ``gather`` from its first
contribution until its sum is complete, a sum is ``queue`` until it leaves for a reader and
``reply`` while it is handed to the socket. What the engine made of a frame is in its counters:
repeated and refused ones leave no mark.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from gradsum.proto.data import Header
from gradsum.server.engine import Action, Engine, Frame, SendSum
from gradsum.trace import Flow, SliceArgs, Span, Trace, arrow

KEPT: Final = 2
"""Versions of a slice that may be under way: one complete and still owed, one open."""


class _Round:
    """A version of a slice."""

    __slots__ = ("complete", "first", "readers", "writers")

    def __init__(self, first: float) -> None:
        self.first = first
        self.complete: float | None = None
        self.writers: set[int] = set()
        self.readers: set[int] = set()


class Timeline:
    """Owned by the shard's thread."""

    def __init__(
        self, trace: Trace, engine: Engine, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.trace = trace
        self._engine = engine
        self._clock = clock
        self._rounds: dict[tuple[int, int, int], _Round] = {}
        self._early: list[tuple[Header, float, float]] = []  # before their plan or table

    def step(self, frame: Frame, now: float) -> list[Action]:
        """Give the engine a data frame; what it was worth is recorded."""
        arrived, before = self._clock(), dict(self._engine.counters)
        actions = self._engine.step(frame, now)
        self._settle()
        after, end = self._engine.counters, self._clock()
        if after["pushes"] > before["pushes"] or after["parked"] > before["parked"]:
            self._added(frame.header, arrived, end)
        if after["sums"] > before["sums"]:
            self._completed(frame.header, end)
        return actions

    def _added(self, header: Header, arrived: float, end: float) -> None:
        round_ = self._round(header, arrived)
        if self._engine.plan is None or header.key >= len(self._engine.table):
            self._early.append((header, arrived, end))
            return
        if header.rank in round_.writers:  # came before its plan, and again after it
            return
        round_.writers.add(header.rank)
        args = self._args(header, header.rank)
        flow = Flow("f", arrived, "push", self._arrow(header, args, "push"))
        self.trace.add(Span("add", self._name(header), arrived, end, args, flow))

    def _completed(self, header: Header, end: float) -> None:
        round_ = self._round(header, end)
        if round_.complete is None:
            round_.complete = end
            self.trace.add(
                Span("gather", self._name(header), round_.first, end, self._args(header, None))
            )

    def sends(self, action: SendSum, send: Callable[[SendSum], None]) -> None:
        """Send a sum; a repeated one is a reply of its own, without an arrow."""
        self._settle()
        header, rank = action.header, action.rank
        start = self._clock()
        send(action)
        end = self._clock()
        self._completed(header, start)  # where no frame completed it: a plan came, or a rank joined
        round_ = self._round(header, start)
        args, name, flow = self._args(header, rank), self._name(header), None
        if rank not in round_.readers:
            round_.readers.add(rank)
            self.trace.add(Span("queue", name, round_.complete or start, start, args))
            flow = Flow("s", start, "sum", self._arrow(header, args, "sum"))
        self.trace.add(Span("reply", name, start, end, args, flow))

    def forget(self) -> None:
        """The job is over; the next one has other slices."""
        self._rounds.clear()
        self._early.clear()

    def _settle(self) -> None:
        """What came early has a name now, or is tried again next time."""
        early, self._early = self._early, []
        for header, arrived, end in early:
            self._added(header, arrived, end)

    def _round(self, header: Header, now: float) -> _Round:
        key, index, version = header.key, header.slice, header.version
        round_ = self._rounds.get((key, index, version))
        if round_ is None:
            self._rounds.pop((key, index, version - KEPT), None)
            round_ = self._rounds[key, index, version] = _Round(now)
        return round_

    def _name(self, header: Header) -> str:
        return self._engine.table[header.key].name

    def _args(self, header: Header, rank: int | None) -> SliceArgs:
        return SliceArgs(
            header.key, header.slice, header.version, rank, header.length, header.priority,
            self.trace.number or 0, header.epoch,
        )  # fmt: skip

    def _arrow(self, header: Header, args: SliceArgs, direction: str) -> str:
        plan = self._engine.plan
        run = "" if plan is None else plan.message.coordinator
        return arrow(run, header.incarnation, args, header.rank, direction)
