"""Planned epochs: a fence that everybody passes before the plan changes (E1).

Rules: one at a time, the others queue. A fence has a number that is never used again and a step F
above every step that is known; a rank that is there already refuses, and a new fence with a higher
number replaces the old one. A rank at F reports what it has submitted, and holds back what comes
now. When all are there, the lowest version that all have submitted is the last that can complete:
ranks consume the sums up to it, and there the clocks of the new plan start (V3). Rounds that only
some have begun, of another optimizer or another thread, are pushed again under it. Once the new
plan is out to the servers it is committed, whoever leaves. Until then it is given up when ranks
stand at it for too long: the others may be waiting, in another thread, for what these would push.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gradsum.proto.control import AtFence, Consume, Consumed, Fence, FenceAck
from gradsum.proto.limits import MAX_INT
from gradsum.scheduler.table import Table

AHEAD: Final = 1
"""Steps between the highest step known and F: the news must arrive before F does. Doubled with each
refusal, since steps may be faster than news."""


class Change(NamedTuple):
    """What a planned epoch changes; None keeps. The packing is made anew in any case."""

    slice_bytes: int | None = None
    pack_bytes: int | None = None
    window: int | None = None
    weights: tuple[float, ...] | None = None  # of the servers, in the order of the plan


@dataclass(slots=True)
class _Open:
    fence: Fence
    change: Change
    ahead: int = AHEAD
    since: float | None = None  # when a rank was first seen at it
    committed: bool = False  # the servers have the new plan
    acked: set[int] = field(default_factory=set)
    versions: dict[int, dict[int, int]] = field(default_factory=dict)
    target: dict[int, int] | None = None  # where all clocks will start, once all are at F
    consumed: set[int] = field(default_factory=set)


class Fences:
    """The open fence of a job and the changes that wait for theirs."""

    __slots__ = ("_open", "_queue", "given_up", "last", "top")

    def __init__(self, last: int = 0) -> None:
        self._queue: deque[Change] = deque()
        self._open: _Open | None = None
        self.given_up: Fence | None = None  # the latest fence, if it was aborted
        self.last = last  # highest number used
        self.top = 0  # highest step known

    @property
    def current(self) -> Fence | None:
        """The open fence."""
        return self._open.fence if self._open else None

    @property
    def number(self) -> int:
        """Number of the open fence, 0 for none."""
        return self._open.fence.number if self._open else 0

    @property
    def change(self) -> Change:
        """What the open fence is for."""
        return self._open.change if self._open else Change()

    @property
    def busy(self) -> bool:
        """Whether a fence is open or asked for."""
        return self._open is not None or bool(self._queue)

    def seen(self, step: int) -> None:
        """A rank has been at this step. Nonsense is passed over."""
        if 0 <= step < MAX_INT // 2:
            self.top = max(self.top, step)

    def request(self, change: Change) -> None:
        """Ask for a planned epoch. An equal request that waits already is not repeated."""
        if change not in self._queue:
            self._queue.append(change)

    def open(self, epoch: int) -> Fence | None:
        """Open the next fence; None if one is open or nothing is asked for."""
        if self._open or not self._queue:
            return None
        self.given_up = None
        self._open = _Open(self._next(epoch, AHEAD), self._queue.popleft())
        return self._open.fence

    def _next(self, epoch: int, ahead: int) -> Fence:
        self.last += 1
        return Fence(self.last, epoch, self.top + ahead)

    def ack(self, rank: int, message: FenceAck) -> Fence | None:
        """Take an answer; returns the new fence that a refusal makes necessary."""
        self.seen(message.step)
        state = self._open
        if state is None or state.committed or message.number != state.fence.number:
            return None
        if message.ok:
            state.acked.add(rank)
            return None
        state.ahead *= 2
        state.fence = self._next(state.fence.epoch, state.ahead)
        state.acked.clear()
        state.versions.clear()
        state.target = None
        state.consumed.clear()
        state.since = None
        return state.fence

    def arrive(self, rank: int, message: AtFence) -> Consume | None:
        """A rank is at F; the answer that it has missed, if all have been there already."""
        state = self._open
        if state is None or state.committed or message.number != state.fence.number:
            return None
        if state.target is not None:
            return Consume(state.fence.number, state.target)
        state.acked.add(rank)
        state.versions[rank] = message.versions
        return None

    def aim(
        self, active: Set[int], table: Table, before: tuple[tuple[int, int], ...]
    ) -> Consume | None:
        """What all ranks are to consume, when the last of them has come to F.

        before: key and version where the clocks of the present plan started; a tensor that a rank
        has not used stands there still, or at its first - 1.
        """
        state = self._open
        if state is None or state.target is not None or not active:
            return None
        if not active <= state.versions.keys() & state.acked:
            return None
        reports = [state.versions[rank] for rank in sorted(active)]
        clocks, target = dict(before), {}
        for key, spec in enumerate(table.since(0)):
            start = clocks.get(key, spec.first - 1)
            target[key] = max(start, min(report.get(key, start) for report in reports))
        state.target = target
        return Consume(state.fence.number, target)

    def consumed(self, rank: int, message: Consumed) -> None:
        """A rank has the sums up to the target."""
        state = self._open
        if state is not None and message.number == state.fence.number and state.target is not None:
            state.consumed.add(rank)

    def complete(self, active: Set[int]) -> bool:
        """Whether every active rank has consumed what can complete."""
        state = self._open
        if state is None or state.committed or state.target is None or not active:
            return False
        return active <= state.consumed

    @property
    def target(self) -> dict[int, int]:
        """The version of every table entry where the new plan's clocks start (V3)."""
        return (self._open.target if self._open else None) or {}

    def commit(self) -> None:
        """The new plan goes out; from here on there is no abort."""
        if self._open:
            self._open.committed = True

    def close(self) -> None:
        """GO has been sent."""
        self._open = None

    def abort(self) -> int:
        """Give up what is open and what waits; returns the number to send GO for, 0 for none."""
        self._queue.clear()
        if self._open is None or self._open.committed:
            return 0
        self.given_up = self._open.fence
        self._open = None
        return self.given_up.number

    def unheard(self, rank: int, step: int) -> Fence | None:
        """The open fence, if this rank, at ``step``, does not know it or its answer was lost."""
        state = self._open
        if state is None or state.committed or rank in state.versions:
            return None
        return state.fence if rank not in state.acked or step >= state.fence.step else None

    def overdue(self, now: float, limit: float) -> bool:
        """Whether a rank has stood at the open fence for ``limit`` s; asked at every event."""
        state = self._open
        if state is None or state.committed or not state.versions:
            return False
        if state.since is None:
            state.since = now
        return now - state.since >= limit

    def awaited(self, active: Set[int]) -> list[int]:
        """The active ranks that are not at F, or have not consumed what can complete."""
        state = self._open
        if state is None:
            return []
        there = state.versions.keys() if state.target is None else state.consumed
        return sorted(active - there)
