"""The cluster of one seed: n Cores, k Engines, a coordinator reduced to its answers, one clock.

Two phases: under faults nothing wrong may be returned (safety), and once the network is healed
everything must end within LIMIT virtual seconds and leave nothing behind (liveness).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

from gradsum.proto.control import PlanMessage, ServerInfo
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import Table, TensorSpec
from gradsum.server import engine as serving
from gradsum.server.adder import Adder
from gradsum.server.engine import Engine
from gradsum.worker import core as working
from gradsum.worker.core import Core
from gradsum.worker.rounds import Op
from tests.sim.network import Clock, Faults, Network
from tests.sim.oracle import Box, Oracle, Violation, payload
from tests.sim.ports import JOB, Port, ServerPort, WorkerPort
from tests.sim.workload import Job

LIMIT = 60.0
HEARTBEAT = 0.5
Program = Generator[float | Callable[[], bool], None, None]


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
        self.coordinator = Coordinator(self)
        self.healed = False
        common: dict[str, Any] = {
            "clock": self.clock, "network": self.network, "rng": self.rng,
            "fetch": self.coordinator.fetch,
        }  # fmt: skip
        self.servers = [
            ServerPort(
                engine(window=job.window, skew=job.skew, park_bytes=job.park, heartbeat=HEARTBEAT,
                       adder=Adder()), 100 + index, **common,
            ) for index in range(job.servers)
        ]  # fmt: skip
        self.workers = [
            WorkerPort(
                core(rank, 10 + rank, b"token%d" % rank, window=job.window, heartbeat=HEARTBEAT),
                b"token%d" % rank, self.servers, **common,
            ) for rank in range(job.workers)
        ]  # fmt: skip
        self.ranks = [Rank(self, worker) for worker in self.workers]

    def run(self) -> None:
        """Both phases; raises Violation, Hang, or whatever escaped."""
        self.coordinator.start()
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
            for slot in engine._slots.values():
                if slot.done is not None or slot.open is not None:
                    raise Hang(f"server {index} keeps {slot.key}.{slot.index} v{slot.base}")
            if engine._parking.used or engine._early:
                raise Hang(f"server {index}: {engine._parking.used} parked bytes are left")
            self._check_lanes(f"server {index}", engine._queue)
        for rank in self.ranks:
            core = rank.port.core
            if not core.settled() or core.waiting():
                raise Hang(f"rank {core.rank} is not settled")
            self._check_lanes(f"rank {core.rank}", core._queue)

    @staticmethod
    def _check_lanes(who: str, queue: Any) -> None:
        for number, lane in queue._lanes.items():
            if lane.heap or lane.sent >= lane.hold:
                raise Hang(f"{who} to {number}: sent {lane.sent}, may {lane.hold}, {lane.heap}")

    def describe(self) -> str:
        """Every option of the run."""
        return f"{self.job}\n{self.faults}"

    def state(self) -> str:
        """Who waits for what."""
        lines = [f"t={self.clock.now:.3f}"]
        for rank in self.ranks:
            core = rank.port.core
            lines.append(
                f"rank {core.rank}: ended={rank.ended} at {rank.where} epoch "
                f"{core.plan.epoch if core.plan else None} {core.counters}"
            )
            for op in core.waiting():
                lines.append(f"  waits k{op.key} v{op.version} missing {op.missing}")
            for stream in core._streams.values():
                for flight in stream.round.flights if stream.round else ():
                    lines.append(
                        f"  k{stream.unit.key}.{flight.slice.number} v{stream.base + 1} "
                        f"{flight.phase.name} server {flight.slice.server} due {flight.due:.3f}"
                    )
            for number, lane in core._queue._lanes.items():
                lines.append(f"  lane {number}: gen {lane.generation} sent {lane.sent} seen "
                             f"{lane.seen} limit {lane.limit} waiting {len(lane.heap)}")  # fmt: skip
        for index, port in enumerate(self.servers):
            engine = port.engine
            lines.append(f"server {index}: epoch {engine.plan.epoch if engine.plan else None} "
                         f"parked {engine._parking.used} {engine.counters}")  # fmt: skip
            for slot in engine._slots.values():
                done = slot.done and (slot.done.version, slot.done.owed, slot.done.queued)
                opened = slot.open and (slot.open.contributed, slot.open.later)
                if done or opened:
                    lines.append(f"  {slot.key}.{slot.index} base {slot.base} {done} {opened}")
            for number, lane in engine._queue._lanes.items():
                lines.append(f"  lane {number}: gen {lane.generation} sent {lane.sent} seen "
                             f"{lane.seen} limit {lane.limit} waiting {len(lane.heap)}")  # fmt: skip
        return "\n".join(lines)


class Coordinator:
    """The table, the plan and the fence, as far as the data plane sees them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.table = Table()
        self.plan: PlanMessage | None = None
        self.joined: list[int] = []
        self.fence = 0
        self.at: dict[int, dict[int, int]] = {}
        self._late = sorted(cluster.job.late, key=lambda entry: entry[0])

    def start(self) -> None:
        """The first plan goes to everybody; workers connect when they have it."""
        cluster, job = self.cluster, self.cluster.job
        for spec in job.early:
            self.table.append(spec)
        infos = tuple(
            ServerInfo(index, 100 + index, "", "", weight)
            for index, weight in enumerate(job.weights)
        )
        members = tuple((rank, 10 + rank) for rank in range(job.workers))
        self.plan = PlanMessage(
            "c", JOB, 1, members, infos, job.slice_bytes, 0, (), 0, 0, 0, (), job.deterministic,
            tuple((rank, b"token%d" % rank) for rank in range(job.workers)),
        )  # fmt: skip
        for server in cluster.servers:
            self._send(server, 0, cluster.rng.random())
        for worker in cluster.workers:
            self._send(worker, 0, cluster.rng.random())

    def fetch(self, port: Any, start: int) -> None:
        """A member asks for the plan and the rest of the table."""
        self._send(port, start, self.cluster.rng.random() * 0.1)

    def _send(self, port: Port, start: int, after: float) -> None:
        """Plan and table, in either order: the connection is reliable, its use need not be."""
        parts = [lambda: self._give_plan(port), lambda: self._give_table(port, start)]
        self.cluster.rng.shuffle(parts)
        for part in parts:
            self.cluster.clock.after(after, part)
            after += self.cluster.rng.random() * 0.02

    def _give_plan(self, port: Port) -> None:
        if self.plan is None:
            return
        plan = Plan.of(self.plan)
        if isinstance(port, ServerPort):
            port.step(serving.Adopt(plan, port.incarnation - 100))
        elif isinstance(port, WorkerPort):
            first = port.core.plan is None
            port.step(working.Adopt(plan))
            if first and port.core.plan is not None:
                for server in range(len(port.servers)):
                    port.connect(server)

    def _give_table(self, port: Port, start: int) -> None:
        specs = self.table.since(start)
        if isinstance(port, ServerPort):
            port.step(serving.Extend(start, specs))
        elif isinstance(port, WorkerPort):
            port.step(working.Extend(start, specs))

    def register(self, window: int) -> None:
        """A rank enters a window: tensors first named there join the table."""
        while self._late and self._late[0][0] <= window:
            self.append(self._late.pop(0)[1])

    def append(self, spec: TensorSpec) -> int:
        """One more tensor; everybody hears of it some time."""
        start = len(self.table)
        key = self.table.append(spec)
        for port in [*self.cluster.servers, *self.cluster.workers]:
            self.cluster.clock.after(
                self.cluster.rng.expovariate(4.0),
                lambda port=port: self._give_table(port, start),  # type: ignore[misc]
            )
        return key

    def arrive(self, rank: int, versions: dict[int, int]) -> None:
        """A rank is at the fence, or has joined and is at every fence."""
        self.at[rank] = versions
        if len(self.at.keys() | set(self.joined)) == self.cluster.job.workers:
            self._go()

    def join(self, rank: int) -> None:
        """A rank has no more data (E7)."""
        self.joined.append(rank)
        if len(self.joined) == self.cluster.job.workers:
            policy = Policy("broadcast", rank)
            self.append(TensorSpec("weights", "float32", "float32", (11,), policy, 1))
        elif self.at:
            self.arrive(rank, {})

    def _go(self) -> None:
        """GO: a new plan with packing and other slices, to servers and workers in any order."""
        rng, table, plan = self.cluster.rng, self.table, self.plan
        if plan is None:
            return
        versions = dict(plan.versions)
        for key in range(len(table)):
            versions.setdefault(key, table[key].first - 1)
        for rank, reported in self.at.items():
            for key, version in reported.items():
                if rank not in self.joined:
                    versions[key] = max(versions[key], version)
        packing = [key for key in range(len(table)) if table[key].first <= self.fence]
        rng.shuffle(packing)
        self.plan = plan._replace(
            epoch=plan.epoch + 1, fence=plan.fence + 1, step=self.fence,
            slice_bytes=rng.choice((8, 16, 40, 64)), pack_bytes=rng.choice((0, 40, 100, 400)),
            packing=tuple(packing) if rng.random() < 0.8 else (), packed=len(table),
            versions=tuple(sorted(versions.items())),
        )  # fmt: skip
        self.at.clear()
        self.fence = 0
        for port in [*self.cluster.servers, *self.cluster.workers]:
            known = port.core.table if isinstance(port, WorkerPort) else port.engine.table
            self._send(port, len(known), rng.random() * 0.3)


class Rank:
    """The training thread of one rank, as a generator that sleeps or waits for a condition."""

    def __init__(self, cluster: Cluster, port: WorkerPort) -> None:
        self.cluster = cluster
        self.port = port
        self.rank = port.core.rank
        self.ended = False
        self.where = "start"
        self._open: dict[int, int] = {}  # window -> ops that are not done
        self._program = self._run()
        self._waits: Callable[[], bool] | None = None
        port.done = self._done

    def start(self) -> None:
        """Begin the program."""
        self._advance()

    def _advance(self) -> None:
        self._waits = None
        wanted = next(self._program, None)
        if wanted is None:
            self.ended = True
        elif callable(wanted):
            self._waits = wanted
            self._look()
        else:
            self.cluster.clock.after(wanted, self._advance)

    def _look(self) -> None:
        """Conditions are looked at every few milliseconds; the core owes nobody a call."""
        if self._waits is None:
            return
        if self._waits():
            self._advance()
        else:
            self.cluster.clock.after(0.01, self._look)

    def _run(self) -> Program:
        job, rng, core = self.cluster.job, self.cluster.rng, self.port.core
        coordinator = self.cluster.coordinator
        for window in range(1, job.last[self.rank] + 1):
            self.where = f"window {window}"
            coordinator.register(window)
            if window in job.fences:
                yield from self._fence(window)
            yield lambda: len(self._open) < job.ahead
            yield from self._submit(window)
        self.where = "join"
        yield lambda: not self._open and core.plan is not None and core.idle()
        self.port.step(working.Join())
        yield core.links.joined_everywhere
        coordinator.join(self.rank)
        yield lambda: coordinator.table.key("weights") is not None
        self.where = "weights"
        yield rng.random() * 0.2
        self._hand_over(len(coordinator.table) - 1, 1, 99)
        yield lambda: not self._open
        self.port.step(working.Settle())
        yield core.settled

    def _fence(self, window: int) -> Program:
        core, coordinator = self.port.core, self.cluster.coordinator
        self.where = f"fence at {window}"
        yield lambda: not self._open and core.plan is not None and core.idle()
        epoch = core.plan.epoch if core.plan else 0
        self.port.step(working.Pause())
        if self.cluster.rng.random() < 0.2:
            self.port.step(working.Resume())
            self.port.step(working.Pause())
        yield core.idle
        coordinator.fence = window
        coordinator.arrive(self.rank, core.versions())
        yield lambda: core.plan is not None and core.plan.epoch > epoch

    def _submit(self, window: int) -> Program:
        rng, table = self.cluster.rng, self.cluster.coordinator.table
        limit = min(self.cluster.job.last)
        keys = [key for key in range(len(table)) if table[key].first <= window]
        if rng.random() < 0.5:
            rng.shuffle(keys)
        pace = rng.choice((0.0, 0.0, 0.01, 0.3))
        for key in keys:
            if table[key].policy.kind == "sum" or window <= limit:
                self._hand_over(key, window, window)
                if pace:
                    yield rng.random() * pace

    def _hand_over(self, key: int, version: int, window: int) -> None:
        cluster = self.cluster
        spec = cluster.coordinator.table[key]
        source = None
        if spec.name == "weights":
            pushes = spec.policy.root == self.rank
        else:
            pushes = cluster.job.pushes(spec, self.rank, version)
        if pushes:
            source = memoryview(bytearray(payload(spec, key, self.rank, version).tobytes()))
        sink = Box(spec) if spec.policy.reads(self.rank) else None
        self._open[window] = self._open.get(window, 0) + 1
        op = Op(key, spec.name, version, source, sink, key + cluster.rng.randint(0, 3), window)
        self.port.step(working.Submit(op))

    def _done(self, op: Op, error: Exception | None) -> None:
        if error is not None:
            raise Violation(f"rank {self.rank}: {op.name} version {op.version} failed: {error}")
        cluster = self.cluster
        spec = cluster.coordinator.table[op.key]
        if spec.policy.reads(self.rank):
            everybody = range(cluster.job.workers)
            pushed = [r for r in everybody if self._pushed(spec, r, op.version)]
            cluster.oracle.judge(self.rank, op, spec, pushed)
        if op.source is not None and op.source.nbytes:  # the caller may write there again
            op.source[:] = b"\x77" * op.source.nbytes
        self._open[op.handle] -= 1
        if not self._open[op.handle]:
            del self._open[op.handle]

    def _pushed(self, spec: TensorSpec, rank: int, version: int) -> bool:
        if spec.name == "weights":
            return rank == spec.policy.root
        return self.cluster.job.pushes(spec, rank, version)


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
