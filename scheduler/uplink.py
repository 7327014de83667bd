"""How fast a sender's link is, and what that makes of the slices (DESIGN 6). No I/O.

A link is measured while it is busy: bytes that the receivers report as arrived, over the time in
which something was under way without a break. Slices are what the slowest member's link carries in
SLICE_TIME: longer ones fill and drain the pipeline slowly and cannot be overtaken, shorter ones
cost a frame each. A slice's server takes in and hands out one copy for each worker, COPIES_TIME for
all of them: with many workers that is what the pipeline waits for. No slice takes less than
FRAME_TIME, what a thread works for it on its way in and out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median
from typing import Final

SLICE_TIME: Final = 0.0025
COPIES_TIME: Final = 0.010
FRAME_TIME: Final = 0.0003
"""Seconds of a slice on the link, of its copies for all workers, and at least."""

SMALLEST: Final = 64 << 10
LARGEST: Final = 4 << 20
START: Final = 4 << 20
LOCAL: Final = 16 << 20
"""Bytes of a slice: the bounds, before anything has been measured, and in shared memory, where only
the work for each slice counts."""

UNDER_WAY: Final = 0.003
"""Seconds of the link that may be under way beside the way there and back: what an urgent slice
waits for, and how far lanes to different receivers may drift apart."""

SPAN: Final = 0.020
ENOUGH: Final = 512 << 10
"""Seconds and bytes of a sample, at least."""

SAMPLES: Final = 9
TRUSTED: Final = 3
"""Samples that are kept, and those that make a rate."""

LUMPS: Final = 8
LONG: Final = 64
FULL: Final = 32
BEST: Final = 8
"""Of the capacity: the largest arrival goes so many times into a sample, or the moments at which
frames happen to be complete would count; samples that are kept, and those that make one; it is the
best of them but for one in so many."""


class _Meter:
    """Samples of a rate within spells in which something is always under way."""

    __slots__ = ("_lump", "_lumps", "_nbytes", "_since", "samples")

    def __init__(self, keep: int, lumps: int) -> None:
        """lumps: how often the largest arrival must go into a sample."""
        self.samples: deque[float] = deque(maxlen=keep)
        self._lumps = lumps
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """A sample begins."""
        self._since = now
        self._nbytes = self._lump = 0

    def add(self, nbytes: int, now: float) -> None:
        """So many bytes more have arrived."""
        self._nbytes += nbytes
        self._lump = max(self._lump, nbytes)
        span = now - self._since
        if span >= SPAN and self._nbytes >= max(ENOUGH, self._lumps * self._lump):
            self.samples.append(self._nbytes / span)
            self.begin(now)


class Uplink:
    """One member's sending side, over all receivers."""

    __slots__ = ("_alone", "_best", "_rates", "_since", "_trips")

    def __init__(self) -> None:
        self._since: float | None = None
        self._alone = False
        self._rates = _Meter(SAMPLES, 1)
        self._best = _Meter(LONG, LUMPS)
        self._trips: deque[float] = deque(maxlen=SAMPLES)

    def departed(self, now: float) -> None:
        """A frame has left."""
        if self._since is None:
            self._since, self._alone = now, True
            self._rates.begin(now)
            self._best.begin(now)

    def arrived(self, nbytes: int, left: int, now: float) -> None:
        """Receivers have seen ``nbytes`` more; ``left`` bytes are still under way."""
        if self._since is None or nbytes <= 0:
            return
        if self._alone:
            self._trips.append(now - self._since)
            self._alone = False
        self._rates.add(nbytes, now)
        self._best.add(nbytes, now)
        if not left:
            self._since = None

    @property
    def bound(self) -> int | None:
        """Bytes that may be under way over all receivers; None while nothing is known."""
        trip = min(self._trips, default=0.0)
        return int(self.rate * (UNDER_WAY + trip)) or None

    @property
    def rate(self) -> float:
        """Bytes per second: the median of the last samples; 0 while there are too few."""
        samples = self._rates.samples
        return median(samples) if len(samples) >= TRUSTED else 0.0

    @property
    def capacity(self) -> float:
        """Bytes per second at best, since receivers with slower links hold most samples back; 0
        while there are too few."""
        samples = sorted(self._best.samples)
        return samples[-1 - len(samples) // BEST] if len(samples) >= FULL else 0.0

    def describe(self) -> dict[str, float]:
        """For heartbeats."""
        return {"uplink": self.rate, "capacity": self.capacity}


def slices_for(rates: Collection[float], current: int) -> int | None:
    """The slice size for workers with these rates; None to keep ``current``: somebody has not been
    measured, or it is less than a factor of two off, which is not worth a fence."""
    slowest = min(rates, default=0.0)
    if slowest <= 0:
        return None
    fitting = _fitting(slowest, len(rates))
    return None if 0.5 < fitting / current < 2 else _rounded(fitting)


def ideal_slices(slowest: float, workers: int) -> int:
    """Bytes of a slice for ``workers`` whose slowest link has this rate."""
    return _rounded(_fitting(slowest, workers))


def _fitting(slowest: float, workers: int) -> float:
    most = slowest * min(SLICE_TIME, max(COPIES_TIME / workers, FRAME_TIME))
    return min(max(most, SMALLEST), LARGEST)


def _rounded(nbytes: float) -> int:
    return 1 << round(math.log2(nbytes))
