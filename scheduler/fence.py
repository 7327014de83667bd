"""Planned epochs: a fence that everybody passes before the plan changes (E1).

Rules: one at a time, the others queue. A fence has a number that is never used again and a step F
above every step that is known; a rank that is there already refuses, and a new fence with a higher
number replaces the old one. When every active rank is at F with its sums consumed, the versions
they report become the clocks of the new plan (V3); if they differ the fence is given up. Once the
new plan is out to the servers it is committed, whoever leaves. Until then it is given up when ranks
stand at it for too long: the others may be waiting, in another thread, for what these would push.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gradsum.errors import MismatchError
from gradsum.proto.control import AtFence, Fence, FenceAck
from gradsum.proto.limits import MAX_INT
from gradsum.scheduler.table import Table

AHEAD: Final = 2
"""Steps between the highest step known and F: the news must arrive before F does."""


class Change(NamedTuple):
    """What a planned epoch changes; None keeps. The packing is made anew in any case."""

    slice_bytes: int | None = None
    pack_bytes: int | None = None


@dataclass(slots=True)
class _Open:
    fence: Fence
    change: Change
    since: float | None = None  # when a rank was first seen at it
    committed: bool = False  # the servers have the new plan
    acked: set[int] = field(default_factory=set)
    versions: dict[int, dict[int, int]] = field(default_factory=dict)


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
        self._open = _Open(self._next(epoch), self._queue.popleft())
        return self._open.fence

    def _next(self, epoch: int) -> Fence:
        self.last += 1
        return Fence(self.last, epoch, self.top + AHEAD)

    def ack(self, rank: int, message: FenceAck) -> Fence | None:
        """Take an answer; returns the new fence that a refusal makes necessary."""
        self.seen(message.step)
        state = self._open
        if state is None or state.committed or message.number != state.fence.number:
            return None
        if message.ok:
            state.acked.add(rank)
            return None
        state.fence = self._next(state.fence.epoch)
        state.acked.clear()
        state.versions.clear()
        state.since = None
        return state.fence

    def arrive(self, rank: int, message: AtFence) -> None:
        """A rank is at F, all sums below F consumed."""
        state = self._open
        if state is not None and not state.committed and message.number == state.fence.number:
            state.acked.add(rank)
            state.versions[rank] = message.versions

    def complete(self, active: Set[int]) -> bool:
        """Whether every active rank is at F."""
        state = self._open
        if state is None or state.committed or not active:
            return False
        return active <= state.versions.keys() & state.acked

    def agreed(self, table: Table, before: dict[int, int]) -> dict[int, int]:
        """The version of every table entry at the fence (V3); MismatchError if ranks differ.

        A tensor that no rank has used keeps its version of ``before``, else its first - 1.
        """
        reports = self._open.versions if self._open else {}
        merged: dict[int, tuple[int, int]] = {}
        for rank, versions in sorted(reports.items()):
            for key, version in versions.items():
                known = merged.setdefault(key, (version, rank))
                if known[0] != version:
                    raise self._differ(table, key, known, (version, rank))
        clocks = {}
        for key, spec in enumerate(table.since(0)):
            unused = before.get(key, spec.first - 1)
            clocks[key] = merged[key][0] if key in merged else unused
        return clocks

    @staticmethod
    def _differ(
        table: Table, key: int, one: tuple[int, int], two: tuple[int, int]
    ) -> MismatchError:
        spec = table.get(key)
        name = spec.name if spec else f"key {key}"
        return MismatchError(
            f"tensor {name!r} is at version {one[0]} on rank {one[1]} and at version {two[0]} on "
            f"rank {two[1]}",
            tensor=name,
        )

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
        """The active ranks that are not at F."""
        return sorted(active - self._open.versions.keys()) if self._open else []
