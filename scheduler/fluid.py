"""Iteration times without overhead: one link per worker, work as a fluid (reference, B5).

What ``gradsum plan`` compares its simulated steps with, and the yardstick of the benchmarks.
Identical workers with equal links do the same at the same time, so one of them stands for all; its
link carries a tensor of m bytes in m * cost seconds, where cost is a closed formula of workers and
servers. Sums leave as their bytes come in. Under ``optimum`` the link always carries the most
urgent bytes that exist, so it is what no schedule can beat that needs forward order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from gradsum.scheduler.profiles import Profile

BUCKET: Final = 25 << 20
"""Bytes of a bucket of DistributedDataParallel; its first one is 1 MiB."""

FIRST_BUCKET: Final = 1 << 20
WARMUP: Final = 4
TIMED: Final = 4


def service_cost(workers: int, servers: int, rate: float) -> float:
    """Seconds for a byte by n workers, k CPU servers and links of ``rate`` bytes/s (BytePS, 3)."""
    n, k = workers, min(servers, workers)
    if n == 1:
        return 1 / rate if servers else 0.0
    return 2 * n * (n - 1) / (n * n + k * n - 2 * k) / rate


def ring_cost(workers: int, rate: float) -> float:
    """Seconds for a byte by an all-reduce over a ring."""
    return 2 * (workers - 1) / workers / rate


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes of one layer, or of a bucket, that can leave from ``ready`` on."""

    ready: float
    layers: tuple[int, ...]
    nbytes: int


def iteration(
    profile: Profile, cost: float, *, urgent: bool, barrier: bool, buckets: bool = False
) -> float:
    """Seconds of an iteration in steady state.

    urgent: the link carries the most urgent bytes first, at once; else the oldest. barrier: the
    next forward pass begins when all sums are in; else each layer waits for its own. buckets: bytes
    travel in DistributedDataParallel's buckets.
    """
    count = len(profile.layers)
    arrived = [0.0] * count
    begins, now, free = [], 0.0, 0.0
    for _ in range(WARMUP + TIMED + 1):
        if barrier:
            now = max(now, *arrived)
        begins.append(now)
        for index, layer in enumerate(profile.layers):
            now = max(now, arrived[index]) + layer.forward
        ready = [0.0] * count
        for index in reversed(range(count)):
            now += profile.layers[index].backward
            ready[index] = now
        sent = _buckets(profile, ready) if buckets else _tensors(profile, ready)
        arrived, free = _carry(sent, cost, free, count, urgent)
    return (begins[-1] - begins[WARMUP]) / TIMED


def _tensors(profile: Profile, ready: list[float]) -> list[Sent]:
    return [Sent(ready[i], (i,), layer.nbytes) for i, layer in enumerate(profile.layers)]


def _buckets(profile: Profile, ready: list[float]) -> list[Sent]:
    found: list[Sent] = []
    layers: list[int] = []
    for index in reversed(range(len(profile.layers))):
        layers.append(index)
        held = sum(profile.layers[i].nbytes for i in layers)
        if held >= (BUCKET if found else FIRST_BUCKET) or not index:
            found.append(Sent(ready[index], tuple(layers), held))
            layers = []
    return found


def _carry(
    sent: list[Sent], cost: float, free: float, count: int, urgent: bool
) -> tuple[list[float], float]:
    """When each layer's sum is in, and when the link is free again.

    All of an iteration's bytes have left before the next one's are ready: its forward pass needs
    them.
    """
    waiting = sorted(sent, key=lambda each: each.ready)
    arrived = [0.0] * count
    queue: list[tuple[float, int, float]] = []
    now, place = free, 0
    while place < len(waiting) or queue:
        if not queue:
            now = max(now, waiting[place].ready)
        while place < len(waiting) and waiting[place].ready <= now:
            each = waiting[place]
            key = float(min(each.layers)) if urgent else each.ready
            heapq.heappush(queue, (key, place, each.nbytes * cost))
            place += 1
        key, which, left = heapq.heappop(queue)
        until = waiting[place].ready if urgent and place < len(waiting) else float("inf")
        if now + left > until:
            heapq.heappush(queue, (key, which, left - (until - now)))
            now = until
            continue
        now += left
        for layer in waiting[which].layers:
            arrived[layer] = now
    return arrived, now


def optimum(profile: Profile, workers: int, servers: int, rate: float) -> float:
    """Seconds of an iteration with instant preemption and no overhead."""
    return iteration(profile, service_cost(workers, servers, rate), urgent=True, barrier=False)


def fifo(profile: Profile, workers: int, servers: int, rate: float) -> float:
    """The same through the same servers, oldest first, all sums before the next forward pass."""
    return iteration(profile, service_cost(workers, servers, rate), urgent=False, barrier=True)


def all_reduce(profile: Profile, workers: int, servers: int, rate: float) -> float:
    """DistributedDataParallel over a perfect ring; ``servers`` are not used."""
    cost = ring_cost(workers, rate)
    return iteration(profile, cost, urgent=False, barrier=True, buckets=True)


Model = Callable[[Profile, int, int, float], float]
POLICIES: Final[Mapping[str, Model]] = MappingProxyType(
    {"optimum": optimum, "fifo": fifo, "all-reduce": all_reduce}
)
