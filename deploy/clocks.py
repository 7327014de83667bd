"""Clocks: how far the clocks of several machines are apart, from frames that both ends have seen.

Rules: processes of one clock (same boot, same time namespace) have no offset. Between two clocks
the frames that took least tell most: with least differences ``there`` and ``back`` (arrival by one
clock less departure by the other) the offset is half of there - back, as NTP reckons, wrong by half
of there + back at most. Over several clocks the least differences are bounds, offset[b] - offset[a]
<= there[a, b], and what follows from two of them in a row is a bound too. The middle between the
tightest bounds from and to the reference obeys them all: no frame arrives before it has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

Bounds = Mapping[tuple[str, str], float]
"""(from, to) -> the least difference of an arrival and its departure, each by its own clock."""


class Offset(NamedTuple):
    """What a clock shows more than the reference; ``error``: wrong by so much at most, None where
    frames cannot say. ``by``: "same clock", "frames", "one way" or "wall clock"."""

    seconds: float
    error: float | None
    by: str


def bounds(frames: Iterable[tuple[str, float, str, float]]) -> dict[tuple[str, str], float]:
    """Of frames (from clock, departure, to clock, arrival) between different clocks."""
    least: dict[tuple[str, str], float] = {}
    for source, left, target, arrived in frames:
        if source != target:
            taken = arrived - left
            least[source, target] = min(taken, least.get((source, target), taken))
    return least


def offsets(reference: str, walls: Mapping[str, float], least: Bounds) -> dict[str, Offset]:
    """The offset of every clock in ``walls``, which has their wall clocks' lead over them."""
    there = _tightest(reference, walls, least)
    back = _tightest(reference, walls, {(b, a): taken for (a, b), taken in least.items()})
    return {clock: _offset(clock, reference, walls, there, back) for clock in walls}


def _offset(
    clock: str, reference: str, walls: Mapping[str, float], there: Mapping[str, float],
    back: Mapping[str, float],
) -> Offset:  # fmt: skip
    if clock == reference:
        return Offset(0.0, 0.0, "same clock")
    high, low = there.get(clock), back.get(clock)
    if high is not None and low is not None:
        return Offset((high - low) / 2, (high + low) / 2, "frames")
    if high is not None:
        return Offset(high, None, "one way")
    if low is not None:
        return Offset(-low, None, "one way")
    return Offset(walls[reference] - walls[clock], None, "wall clock")


def _tightest(reference: str, clocks: Iterable[str], least: Bounds) -> dict[str, float]:
    """The shortest sums of bounds from the reference (Bellman and Ford; bounds may be negative)."""
    found = {reference: 0.0}
    for _ in clocks:
        for (source, target), taken in least.items():
            if source in found:
                through = found[source] + taken
                found[target] = min(through, found.get(target, through))
    return found
