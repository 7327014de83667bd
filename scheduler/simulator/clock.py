"""Virtual time: what happens when, in one order for every run.

Events of one moment happen in the order in which they were asked for, so a simulation is
deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Event = Callable[[], None]


class Stuck(Exception):
    """Nothing is left to happen although the simulated job is not done: a defect."""


class Clock:
    """Seconds since the beginning, and what is still to happen."""

    __slots__ = ("_count", "_events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._events: list[tuple[float, int, Event]] = []

    def at(self, when: float, event: Event) -> None:
        """Let something happen at a moment, which has not passed."""
        self._count += 1
        heapq.heappush(self._events, (max(when, self.now), self._count, event))

    def run(self, done: Callable[[], bool]) -> None:
        """Let time pass until ``done``; Stuck if it never comes."""
        while not done():
            if not self._events:
                raise Stuck(f"nothing happens after {self.now:.6f} s")
            self.now, _, event = heapq.heappop(self._events)
            event()
