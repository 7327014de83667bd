"""A virtual clock, and a network that loses, repeats, delays and reorders messages."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass


class Clock:
    """A heap of calls by virtual time; nothing here ever sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Run ``call`` at a time, not before now."""
        self.events += 1
        heapq.heappush(self._heap, (max(when, self.now), self.events, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Run ``call`` in so many seconds."""
        self.at(self.now + seconds, call)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Run calls in order until ``done()`` (True) or the time is over (False)."""
        while not done():
            if not self._heap or self._heap[0][0] > until:
                self.now = until
                return done()
            self.now, _, call = heapq.heappop(self._heap)
            call()
        return True


@dataclass(frozen=True, slots=True)
class Faults:
    """Rates of one channel: probabilities per message; delays in seconds."""

    loss: float = 0.0
    repeat: float = 0.0
    late: float = 0.0  # share of messages with a delay of up to ``lateness``
    lateness: float = 1.5
    delay: float = 0.002  # mean of the exponential delay, hence reordering

    @classmethod
    def draw(cls, rng: random.Random) -> Faults:
        """Some channel of some bad day."""
        return cls(
            loss=rng.choice((0.0, 0.02, 0.1, 0.3)),
            repeat=rng.choice((0.0, 0.05, 0.2)),
            late=rng.choice((0.0, 0.02, 0.1)),
            delay=rng.choice((0.0005, 0.002, 0.02)),
        )


CALM = Faults()


class Network:
    """Carries messages of named channels; ``heal`` ends all faults."""

    def __init__(self, clock: Clock, rng: random.Random, faults: dict[str, Faults]) -> None:
        self._clock = clock
        self._rng = rng
        self._faults = faults
        self.lost = 0
        self.carried = 0

    def heal(self) -> None:
        """From now on every message arrives once, soon, but not in order."""
        self._faults = {}

    def carry(self, channel: str, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` once, later, twice or never."""
        faults, rng = self._faults.get(channel, CALM), self._rng
        self.carried += 1
        if rng.random() < faults.loss:
            self.lost += 1
            return
        for _ in range(2 if rng.random() < faults.repeat else 1):
            delay = rng.expovariate(1 / faults.delay)
            if rng.random() < faults.late:
                delay += rng.random() * faults.lateness
            self._clock.after(delay, deliver)
