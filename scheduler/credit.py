"""The receiver's side of flow control: how far each sender may go (F1, F2).

Inflow follows one connection. Skew holds a sender within ``slack`` bytes of the slowest that was
active in the last 30 ms, and lets go by itself: a hint, never a condition for progress.
"""

from __future__ import annotations

from typing import Final, NamedTuple

ACTIVE: Final = 0.030
"""Seconds without a push after which a sender no longer holds the others back."""

FRAME_COST: Final = 256
"""Bytes counted for a header, so that header-only frames use credit too."""


IN_WINDOW: Final = 8
AHEAD: Final = 4
"""Slices that one sender may have under way, and by which it may lead, unless settings say more."""


NEWS: Final = 8
"""A sender hears of arrivals when they fill this part of its window: a slice of the usual eight."""


class Bounds(NamedTuple):
    """Bytes that settings allow; None: as many slices as is usual."""

    credit: int | None = None
    skew: int | None = None

    def window(self, slice_bytes: int, slices: int = 0) -> int:
        """What one sender may have under way; ``slices``: as the plan says, 0 if it does not."""
        if slices:
            return slices * (slice_bytes + FRAME_COST)
        usual = IN_WINDOW * (slice_bytes + FRAME_COST)
        return usual if self.credit is None else self.credit

    def slack(self, slice_bytes: int) -> int:
        """How far a sender may lead."""
        usual = AHEAD * (slice_bytes + FRAME_COST)
        return usual if self.skew is None else self.skew


class Grant(NamedTuple):
    """Absolute offsets of the sender's connection ``generation``."""

    generation: int
    seen: int
    hold: int
    limit: int


class Inflow:
    """Bytes that arrived on one connection, and the last grant that was sent for it."""

    __slots__ = ("generation", "last", "progress", "seen", "told", "window")

    def __init__(self, generation: int, window: int) -> None:
        self.generation = generation
        self.window = window
        self.seen = 0
        self.progress = 0
        self.last = float("-inf")
        self.told: Grant | None = None

    def arrived(self, offset: int, now: float) -> None:
        """A frame that ends at ``offset`` came in: its credit returns, whatever its fate (F1)."""
        self.seen = max(self.seen, offset)
        self.last = now

    def grant(self, ahead: int | None = None) -> Grant:
        """The grant for now; ``ahead`` bytes beyond what was seen at most, None: the window."""
        limit = self.seen + self.window
        hold = limit if ahead is None else min(limit, self.seen + max(ahead, 0))
        return Grant(self.generation, self.seen, hold, limit)

    def news(self, grant: Grant) -> bool:
        """Whether the sender should hear of it: a NEWS-th of the window is free again, or more."""
        told = self.told
        if told is None or told.generation != grant.generation:
            return True
        step = max(self.window // NEWS, 1)
        return grant.limit - told.limit >= step or grant.hold - told.hold >= step or (
            grant.hold > told.hold and told.hold <= grant.seen
        )

    def offer(self, ahead: int | None = None, *, always: bool = False) -> Grant | None:
        """The grant that the sender is to be told now, and is; None when it would be no news."""
        grant = self.grant(ahead)
        if not always and not self.news(grant):
            return None
        self.told = grant
        return grant


class Skew:
    """Decides how far a sender may run ahead of the slowest active one (F2)."""

    __slots__ = ("slack",)

    def __init__(self, slack: int) -> None:
        self.slack = slack

    def ahead(self, inflow: Inflow, others: list[Inflow], now: float) -> int | None:
        """Bytes that ``inflow`` may send beyond what was seen; None: no bound."""
        active = [o.progress for o in others if o is not inflow and now - o.last < ACTIVE]
        if not active:
            return None
        return min(active) + self.slack - inflow.progress
