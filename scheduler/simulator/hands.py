"""Hands: the one thread of a member that sends and receives frames, each of which takes it a time.

Frames that arrive are taken in their order and go before frames to send.
"""

from __future__ import annotations

from collections.abc import Callable

from gradsum.scheduler.simulator.clock import Clock, Event


class Hands:
    """send() sends what stands for some frames and returns their number, 0 if nothing may go."""

    __slots__ = ("_clock", "_cost", "_free", "_planned", "_send")

    def __init__(self, clock: Clock, cost: float, send: Callable[[], float]) -> None:
        """cost: seconds for each frame."""
        self._clock = clock
        self._cost = cost
        self._send = send
        self._free = 0.0
        self._planned = False

    def take(self, frames: float, event: Event) -> None:
        """Frames have arrived: they are handled when the hands are free."""
        self._free = max(self._free, self._clock.now) + frames * self._cost
        self._clock.at(self._free, event)

    def pump(self) -> None:
        """Send what may be sent, as soon as the hands are free."""
        if self._planned:
            return
        while self._free <= self._clock.now:
            frames = self._send()
            if not frames:
                return
            self._free = self._clock.now + frames * self._cost
        self._planned = True
        self._clock.at(self._free, self._again)

    def _again(self) -> None:
        self._planned = False
        self.pump()
