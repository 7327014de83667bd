"""How fast a sender's link is, and what that makes of the slices (DESIGN 6). No I/O.

A link is measured while it is busy: bytes that the receivers report as arrived, over the time in
which something was under way without a break. Slices are what the slowest member's link carries in
SLICE_TIME: longer ones fill and drain the pipeline slowly and cannot be overtaken, shorter ones
cost a frame each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Final

SLICE_TIME: Final = 0.0025
SMALLEST: Final = 64 << 10
LARGEST: Final = 4 << 20
START: Final = 4 << 20
LOCAL: Final = 16 << 20
"""Bytes of a slice: the bounds, before anything has been measured, and in shared memory, where only
the work for each slice counts."""

UNDER_WAY: Final = 0.025
"""Seconds of the link that may be under way: what an urgent slice waits for, and how far lanes to
different receivers may drift apart."""

SPAN: Final = 0.020
ENOUGH: Final = 512 << 10
"""Seconds and bytes of a sample, at least."""

SAMPLES: Final = 9
TRUSTED: Final = 3
"""Samples that are kept, and those that make a rate."""


class Uplink:
    """One member's sending side, over all receivers."""

    __slots__ = ("_arrived", "_rates", "_since")

    def __init__(self) -> None:
        self._since: float | None = None
        self._arrived = 0
        self._rates: deque[float] = deque(maxlen=SAMPLES)

    def departed(self, now: float) -> None:
        """A frame has left."""
        if self._since is None:
            self._since, self._arrived = now, 0

    def arrived(self, nbytes: int, left: int, now: float) -> None:
        """Receivers have seen ``nbytes`` more; ``left`` bytes are still under way."""
        if self._since is None or nbytes <= 0:
            return
        self._arrived += nbytes
        span = now - self._since
        if span >= SPAN and self._arrived >= ENOUGH:
            self._rates.append(self._arrived / span)
            self._since, self._arrived = now, 0
        if not left:
            self._since = None

    @property
    def bound(self) -> int | None:
        """Bytes that may be under way over all receivers; None while nothing is known."""
        return int(self.rate * UNDER_WAY) or None

    @property
    def rate(self) -> float:
        """Bytes per second: the median of the last samples; 0 while there are too few."""
        return median(self._rates) if len(self._rates) >= TRUSTED else 0.0


def slices_for(rates: Iterable[float], current: int) -> int | None:
    """The slice size for members with these rates; None to keep ``current``: nobody has been
    measured, or it is less than a factor of two off, which is not worth a fence."""
    slowest = min(rates, default=0.0)
    if slowest <= 0:
        return None
    ideal = min(max(slowest * SLICE_TIME, SMALLEST), LARGEST)
    if 0.5 < ideal / current < 2:
        return None
    return 1 << round(math.log2(ideal))
