"""Timers: one deadline for each flight and one for each stream's acknowledgement. No I/O.

A target holds its own deadline; what lies in the heap for another time is void.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from gradsum.worker.rounds import Flight, Stream

Target = Flight | Stream


class Timers:
    """Deadlines in order."""

    __slots__ = ("_count", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Target]] = []
        self._count = 0

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()

    def arm(self, target: Target, now: float, after: float) -> None:
        """The target is due in ``after`` seconds, and at no other time."""
        if isinstance(target, Flight):
            target.rto, target.due = after, now + after
        else:
            target.ack_rto, target.ack_due = after, now + after
        self._put(target, now + after)

    def hasten(self, flight: Flight, due: float) -> None:
        """The flight is due at another time; how long it waits next is as before."""
        flight.due = due
        self._put(flight, due)

    def _put(self, target: Target, due: float) -> None:
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, target))

    @staticmethod
    def _valid(timer: tuple[float, int, Target]) -> bool:
        due, _, target = timer
        return due == (target.due if isinstance(target, Flight) else target.ack_due)

    def next(self) -> float:
        """When somebody is due, or infinity."""
        while self._heap and not self._valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else float("inf")

    def due(self, now: float) -> Iterator[Target]:
        """Targets whose time has come; they may be armed again meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)
            if self._valid(timer):
                yield timer[2]
