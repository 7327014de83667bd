"""Flow: how far each worker may send, as one shard grants it (F1, F2). No I/O."""

from __future__ import annotations

from typing import Final

from gradsum.proto.peer import Credit
from gradsum.scheduler.credit import Bounds, Inflow, Skew
from gradsum.scheduler.uplink import START

EXPIRE: Final = 0.030
"""Seconds after which holds are looked at again (F2)."""


class Flow:
    """The inflow of every attached worker, and the grants that they should hear of."""

    __slots__ = ("_arrivals", "_bounds", "_heartbeat", "_inflows", "_next", "_skew", "_window")

    def __init__(self, bounds: Bounds, heartbeat: float) -> None:
        """heartbeat: seconds between repeated grants."""
        self._bounds = bounds
        self._window = bounds.window(START)
        self._skew = Skew(bounds.slack(START))
        self._heartbeat = heartbeat
        self._next = 0.0
        self._arrivals = False
        self._inflows: dict[int, Inflow] = {}

    def __contains__(self, rank: int) -> bool:
        return rank in self._inflows

    @property
    def ranks(self) -> tuple[int, ...]:
        """Workers that have been attached."""
        return tuple(self._inflows)

    def resize(self, slice_bytes: int, slices: int = 0) -> None:
        """Slices have another size, windows hold ``slices`` of them (0: as settings say); windows
        that shrink do so as bytes arrive."""
        self._window = self._bounds.window(slice_bytes, slices)
        self._skew = Skew(self._bounds.slack(slice_bytes))
        for inflow in self._inflows.values():
            inflow.window = self._window

    def attach(self, rank: int, generation: int) -> bool:
        """A connection is bound; True when it is a new one, which starts at the slowest (F2)."""
        known = self._inflows.get(rank)
        if known is not None and known.generation == generation:
            return False
        fresh = Inflow(generation, self._window)
        fresh.progress = min((i.progress for i in self._inflows.values()), default=0)
        self._inflows[rank] = fresh
        return True

    def arrived(self, rank: int, generation: int, offset: int, now: float) -> bool:
        """A frame came in; its credit returns. False: it is of another connection."""
        inflow = self._inflows.get(rank)
        if inflow is None or inflow.generation != generation:
            return False
        inflow.arrived(offset, now)
        self._arrivals = True
        return True

    def counted(self, rank: int, nbytes: int) -> None:
        """So many bytes of a worker went into rounds: its progress among the others (F2)."""
        self._inflows[rank].progress += nbytes

    def grant(self, rank: int, now: float, always: bool) -> Credit | None:
        """The grant for a worker; None when it is no news and need not be told."""
        inflow = self._inflows[rank]
        ahead = self._skew.ahead(inflow, list(self._inflows.values()), now)
        grant = inflow.offer(ahead, always=always)
        return None if grant is None else Credit(*grant)

    def pressing(self, now: float) -> bool:
        """Whether a heartbeat is due, or a grant is news."""
        if now >= self._next:
            return True
        if not (self._arrivals or self.held()):
            return False
        inflows = list(self._inflows.values())
        return any(i.news(i.grant(self._skew.ahead(i, inflows, now))) for i in inflows)

    def due(self, now: float) -> bool:
        """Whether a heartbeat is due; then the next one is set."""
        if now < self._next:
            return False
        self._next = now + self._heartbeat
        return True

    def changed(self) -> bool:
        """Whether grants may have changed since the last call."""
        arrivals, self._arrivals = self._arrivals, False
        return arrivals or self.held()

    def held(self) -> bool:
        """Whether somebody is held back, so that time alone may let them go (F2)."""
        return any(
            i.told is not None and i.told.hold < i.told.limit for i in self._inflows.values()
        )

    def next_deadline(self, now: float) -> float:
        """When grants are to be looked at again."""
        return min(self._next, now + EXPIRE) if self.held() else self._next
