"""What a timed round costs: minor faults and processor time of this process, idle processors.

Rule: counters are read right before and after the timed part, so that start-up, filling and
checking do not count. The machine's counters have ticks of 10 ms: only sums over rounds mean
something.
"""

from __future__ import annotations

import resource
from typing import NamedTuple

import psutil


class Usage(NamedTuple):
    """Counters, or the difference of two readings."""

    minor_faults: float
    cpu_seconds: float  # this process, all its threads
    idle_seconds: float  # of all processors of the machine
    machine_seconds: float

    @classmethod
    def now(cls) -> Usage:
        """The counters as they are."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        times = psutil.cpu_times()
        every = sum(times) - times.guest - times.guest_nice  # counted under user and nice, too
        return cls(own.ru_minflt, own.ru_utime + own.ru_stime, times.idle + times.iowait, every)

    def since(self, before: Usage) -> Usage:
        """What was used between two readings."""
        return Usage(*(b - a for a, b in zip(before, self, strict=True)))
