"""Clusters: which machines a simulated job has, and how a large one is made small.

Up to EXACT workers every machine is simulated. Beyond, machines stand for groups of equal ones: a
frame of c times the slice, from a group of c workers to a group of c servers, takes as long as c
slices from each worker to c servers, one after the other, and loads every link alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from gradsum.errors import ConfigError
from gradsum.scheduler.placement import shares

EXACT: Final = 16


@dataclass(frozen=True, slots=True)
class Group:
    """``count`` equal machines with links of ``rate`` bytes/s, each a server of ``part`` of all."""

    rate: float
    count: float
    part: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Links of workers and of CPU servers in bytes/s; on every worker's machine is a server too,
    which carries what the placement says. latency: seconds from machine to machine, besides the
    bytes; frame: seconds of a member's thread for each frame that it sends or receives.
    """

    workers: tuple[float, ...]
    servers: tuple[float, ...] = ()
    latency: float = 0.0
    frame: float = 0.0

    @classmethod
    def equal(
        cls, workers: int, servers: int, rate: float, *, latency: float = 0.0, frame: float = 0.0
    ) -> Cluster:
        """Machines with equal links."""
        return cls((rate,) * workers, (rate,) * servers, latency, frame)

    @property
    def scale(self) -> float:
        """Workers that one simulated machine stands for."""
        return max(len(self.workers) / EXACT, 1.0)

    def groups(self) -> tuple[list[Group], list[Group]]:
        """Workers' machines and CPU servers. ConfigError for unequal links of a large cluster."""
        own, extra = shares(self.workers, self.servers)
        if self.scale > 1 and len({*self.workers, *self.servers}) > 1:
            raise ConfigError(f"more than {EXACT} workers need equal links", hint="leave some out")
        return self._grouped(self.workers, own), self._grouped(self.servers, extra)

    def _grouped(self, rates: tuple[float, ...], parts: tuple[float, ...]) -> list[Group]:
        if self.scale == 1 or not rates:
            return [Group(rate, 1, part) for rate, part in zip(rates, parts, strict=True)]
        groups = math.ceil(len(rates) / self.scale)
        return [Group(rates[0], len(rates) / groups, parts[0])] * groups
