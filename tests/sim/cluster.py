"""The cluster of one seed: n Cores, k Engines, a coordinator reduced to its answers, one clock.

Two phases: under faults nothing wrong may be returned (safety), and once the network is healed
everything must end within LIMIT virtual seconds and leave nothing behind (liveness).
"""

from __future__ import annotations

import random
from typing import Any

from gradsum.scheduler.credit import Bounds
from gradsum.server.adder import Adder
from gradsum.server.engine import Engine
from gradsum.worker.core import Core
from tests.sim import report
from tests.sim.coordinator import Coordinator
from tests.sim.network import Clock, Faults, Network
from tests.sim.oracle import Oracle
from tests.sim.pool import Pool
from tests.sim.ports import ServerPort, WorkerPort
from tests.sim.program import Rank
from tests.sim.workload import Job

LIMIT = 60.0
HEARTBEAT = 0.5


class Hang(AssertionError):
    """Something did not end in bounded virtual time, or left something behind."""


class Cluster:
    """Build, run, judge. ``core`` and ``engine`` may be subclasses with planted bugs."""

    def __init__(self, job: Job, core: type[Core] = Core, engine: type[Engine] = Engine) -> None:
        self.job = job
        self.rng = random.Random(job.seed + 1)
        self.clock = Clock()
        channels = ("pushes", "sums", "up", "down")
        self.faults = {name: Faults.draw(self.rng) for name in channels}
        self.network = Network(self.clock, self.rng, self.faults)
        self.oracle = Oracle(job.workers)
        self.coordinator = Coordinator(job, self.clock, self.rng)
        self.healed = False
        self._sent: dict[str, tuple[int, int]] = {}
        common: dict[str, Any] = {
            "clock": self.clock, "network": self.network, "rng": self.rng,
            "fetch": self.coordinator.fetch,
        }  # fmt: skip
        pools = [Pool() for _ in range(job.servers)]
        self.servers = [
            ServerPort(
                engine(bounds=Bounds(job.window, job.skew), park_bytes=job.park,
                       heartbeat=HEARTBEAT, adder=Adder(pool.take) if job.placed else Adder()),
                100 + index, pool, **common,
            ) for index, pool in enumerate(pools)
        ]  # fmt: skip
        self.workers = [
            WorkerPort(
                core(rank, 10 + rank, b"token%d" % rank, bounds=Bounds(job.window),
                     heartbeat=HEARTBEAT),
                b"token%d" % rank, self.servers, job.placed, **common,
            ) for rank in range(job.workers)
        ]  # fmt: skip
        self.ranks = [
            Rank(job, self.clock, self.rng, self.coordinator, self.oracle, worker)
            for worker in self.workers
        ]

    def run(self) -> None:
        """Both phases; raises Violation, Hang, or whatever escaped."""
        self.coordinator.start([*self.servers, *self.workers])
        for rank in self.ranks:
            rank.start()
        self._reset_links()
        heal = self.clock.now + self.job.chaos
        self.clock.run(heal, self.finished)
        self.heal()
        if not self.clock.run(self.clock.now + LIMIT, self.finished):
            raise Hang(f"{self.describe()}\n{self.state()}")
        self.clock.run(self.clock.now + 5.0)
        self.check_rest()

    def finished(self) -> bool:
        """Whether every rank's program has ended."""
        return all(rank.ended for rank in self.ranks)

    def heal(self) -> None:
        """End all faults."""
        self.healed = True
        self.network.heal()
        self._sent = {name: (lane.generation, lane.sent) for name, lane in self._lanes().items()}

    def _lanes(self) -> dict[str, Any]:
        """Every connection that bytes are sent on, by a name for errors."""
        lanes: dict[str, Any] = {}
        for index, port in enumerate(self.servers):
            for rank, down in port.engine._egress._queue._lanes.items():
                lanes[f"server {index} to rank {rank}"] = down
        for worker in self.workers:
            for index, up in worker.core._queue._lanes.items():
                lanes[f"rank {worker.core.rank} to server {index}"] = up
        return lanes

    def _reset_links(self) -> None:
        """Now and then a connection is made anew, by the worker or by the socket itself."""
        every = self.rng.choice((float("inf"), 4.0, 0.7))
        if every == float("inf"):
            return

        def reset() -> None:
            if self.healed:
                return
            worker = self.rng.choice(self.workers)
            server = self.rng.randrange(len(self.servers))
            what = self.rng.choice(("data", "control", "both"))
            if not worker.generations[server]:
                pass
            elif what == "both":
                worker.connect(server)
            else:
                worker.reroute(server, what)
            self.clock.after(self.rng.expovariate(1 / every), reset)

        self.clock.after(self.rng.expovariate(1 / every), reset)

    # -- after the run -------------------------------------------------------------------------

    def check_rest(self) -> None:
        """Nothing is left: rounds, parked bytes, queued frames; every lane can send again."""
        for index, port in enumerate(self.servers):
            engine = port.engine
            for slot in engine._holding.slots.values():
                if slot.done is not None or slot.open is not None:
                    raise Hang(f"server {index} keeps {slot.key}.{slot.index} v{slot.base}")
            if engine._parking.used or engine._early:
                raise Hang(f"server {index}: {engine._parking.used} parked bytes are left")
        for rank in self.ranks:
            core = rank.port.core
            if not core.settled() or core.waiting():
                raise Hang(f"rank {core.rank} is not settled")

        for name, one in self._lanes().items():
            self._check_lane(name, one)

    def _check_lane(self, name: str, lane: Any) -> None:
        """All that arrived has returned its credit; what was lost is tried when needed (F3)."""
        if lane.heap:
            raise Hang(f"{name}: {len(lane.heap)} frames wait")
        lossless = self._sent.get(name, (0, 0)) < (lane.generation, lane.sent)
        if lossless and not lane.sent == lane.seen < lane.hold:
            raise Hang(f"{name}: sent {lane.sent}, seen {lane.seen}, may go to {lane.hold}")

    def describe(self) -> str:
        """Every option of the run."""
        return f"{self.job}\n{self.faults}"

    def state(self) -> str:
        """Who waits for what."""
        lines = [f"t={self.clock.now:.3f}"]
        for rank in self.ranks:
            lines += report.worker(rank.port.core, f"ended={rank.ended} at {rank.where}")
        for index, port in enumerate(self.servers):
            lines += report.server(index, port.engine)
        return "\n".join(lines)


def run(job: Job, core: type[Core] = Core, engine: type[Engine] = Engine) -> Cluster:
    """Run a job; the error of a failed run carries every option."""
    cluster = Cluster(job, core, engine)
    try:
        cluster.run()
    except AssertionError:
        raise
    except Exception as error:
        raise RuntimeError(f"{error!r} escaped\n{cluster.describe()}") from error
    return cluster
