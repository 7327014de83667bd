"""Simulations: how long a step of a model takes on a cluster, by the code that moves its bytes.

Queue, credit, slicing, placement and the measuring of links are those of the product; machines,
links and computation are a model (network.py, replica.py, shard.py). Without latency and cost for
each frame, what a simulation takes longer than the fluid model is the price of slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gradsum.scheduler.profiles import Profile
from gradsum.scheduler.schedule import OURS, Schedule
from gradsum.scheduler.simulator.clock import Clock
from gradsum.scheduler.simulator.cluster import Cluster
from gradsum.scheduler.simulator.job import Job, describe
from gradsum.scheduler.simulator.network import Machine, Network
from gradsum.scheduler.simulator.replica import Replica
from gradsum.scheduler.simulator.shard import Shard
from gradsum.scheduler.uplink import ideal_slices

WARMUP: Final = 2
TIMED: Final = 3
PACK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Simulated:
    """seconds: of a step, the slowest worker's; waited: seconds of it in which its computation
    stood still; carried: bytes of a step out of and into each machine, workers' machines first;
    slice_bytes: of the slices that were used.
    """

    seconds: float
    waited: float
    carried: tuple[tuple[float, float], ...]
    slice_bytes: int


def simulate(
    profile: Profile, cluster: Cluster, schedule: Schedule = OURS, *, barrier: bool = False,
    slice_bytes: int | None = None, pack_bytes: int = PACK, warmup: int = WARMUP,
    steps: int = TIMED,
) -> Simulated:  # fmt: skip
    """A step in steady state. slice_bytes None: as the schedule says, or as the links are."""
    size = slice_bytes or schedule.slice_bytes or ideal_slices(
        min(cluster.workers), len(cluster.workers)
    )
    workers, extras = cluster.groups()
    job = describe(
        profile, schedule, barrier=barrier, slice_bytes=int(size * cluster.scale),
        pack_bytes=pack_bytes, frame_bytes=size,
        weights=tuple(group.part * group.count for group in (*workers, *extras)),
    )  # fmt: skip
    clock = Clock()
    machines = [Machine(group.rate, group.count) for group in (*workers, *extras)]
    replicas = _members(job, clock, cluster, machines, len(workers))
    for replica in replicas:
        replica.begin()
    clock.run(lambda: all(len(replica.begins) > warmup for replica in replicas))
    before = [(machine.up.carried, machine.down.carried) for machine in machines]
    waited = [replica.waited for replica in replicas]
    clock.run(lambda: all(len(replica.begins) > warmup + steps for replica in replicas))
    spans = [each.begins[warmup + steps] - each.begins[warmup] for each in replicas]
    return Simulated(
        max(spans) / steps,
        max(r.waited - past for r, past in zip(replicas, waited, strict=True)) / steps,
        tuple(
            ((machine.up.carried - up) / steps, (machine.down.carried - down) / steps)
            for machine, (up, down) in zip(machines, before, strict=True)
        ),
        size,
    )


def _members(
    job: Job, clock: Clock, cluster: Cluster, machines: list[Machine], workers: int
) -> list[Replica]:
    network = Network(clock, cluster.latency)
    replicas = [
        Replica(rank, clock, network, machines[rank], job, cluster.frame)
        for rank in range(workers)
    ]
    shards = [
        Shard(number, clock, network, machine, job, cluster.frame, replicas)
        for number, machine in enumerate(machines)
    ]
    for replica in replicas:
        replica.connect(shards)
    return replicas
