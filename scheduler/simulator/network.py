"""Links: full-duplex, one for each machine, around a switch that is never full.

A frame takes its bytes by the rate on the sender's way out, and as long on the receiver's way in,
which begins as soon as the first byte has come (packets do not wait for each other). On each way
frames go one after the other, in the order in which they came. Own-machine frames take no time.

A machine may stand for several equal ones that do the same at the same time (see cluster.py); the
bytes are then those of one of them.
"""

from __future__ import annotations

from gradsum.scheduler.simulator.clock import Clock, Event


class Way:
    """One direction of a link."""

    __slots__ = ("carried", "free", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free = 0.0
        self.carried = 0.0  # bytes so far

    def reserve(self, now: float, nbytes: float) -> tuple[float, float]:
        """When a frame begins and ends."""
        begin = max(now, self.free)
        self.free = begin + nbytes / self.rate
        self.carried += nbytes
        return begin, self.free


class Machine:
    """A link of ``rate`` bytes/s out and in; ``count``: equal machines that this one stands for."""

    __slots__ = ("count", "down", "up")

    def __init__(self, rate: float, count: float = 1) -> None:
        self.count = count
        self.up = Way(rate)
        self.down = Way(rate)


class Network:
    """Carries frames between machines."""

    __slots__ = ("_clock", "_latency")

    def __init__(self, clock: Clock, latency: float) -> None:
        """latency: seconds from one machine to another, besides the bytes."""
        self._clock = clock
        self._latency = latency

    def send(
        self, source: Machine, target: Machine, out: float, into: float, deliver: Event
    ) -> None:
        """A frame of ``out`` bytes at the sender's link and ``into`` at the receiver's."""
        if source is target:
            elsewhere = 1 - 1 / source.count  # of a group's machines, each has one at home
            out, into = out * elsewhere, into * elsewhere
        if not out:
            self._clock.at(self._clock.now, deliver)
            return
        begin, end = source.up.reserve(self._clock.now, out)

        def enter() -> None:
            _, last = target.down.reserve(self._clock.now, into)
            self._clock.at(max(last, end + self._latency), deliver)

        self._clock.at(begin + self._latency, enter)

    def tell(self, deliver: Event) -> None:
        """A control message: no bytes to speak of."""
        self._clock.at(self._clock.now + self._latency, deliver)
