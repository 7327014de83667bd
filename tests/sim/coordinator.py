"""The coordinator of a simulated cluster, reduced to its answers: table, plan, fence, joins.

Its connections are reliable but news takes its time: plan and table come in either order, and
members adopt a new plan at different moments.
"""

from __future__ import annotations

import random
from functools import partial

from gradsum.proto.control import PlanMessage, ServerInfo
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import Table, TensorSpec
from gradsum.server import engine as serving
from gradsum.worker import core as working
from tests.sim.network import Clock
from tests.sim.ports import JOB, Port, ServerPort, WorkerPort
from tests.sim.workload import Job


class Coordinator:
    """The table, the plan and the fence, as far as the data plane sees them."""

    def __init__(self, job: Job, clock: Clock, rng: random.Random) -> None:
        self.job = job
        self.clock = clock
        self.rng = rng
        self.ports: list[ServerPort | WorkerPort] = []
        self.table = Table()
        self.plan: PlanMessage | None = None
        self.joined: list[int] = []
        self.fence = 0
        self.at: dict[int, dict[int, int]] = {}
        self.target: dict[int, int] | None = None
        self._consumed: set[int] = set()
        self._late = sorted(job.late, key=lambda entry: entry[0])

    def start(self, ports: list[ServerPort | WorkerPort]) -> None:
        """The first plan goes to everybody; workers connect when they have it."""
        job, self.ports = self.job, ports
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
        for port in ports:
            self._send(port, 0, self.rng.random())

    def fetch(self, port: Port, start: int) -> None:
        """A member asks for the plan and the rest of the table."""
        self._send(port, start, self.rng.random() * 0.1)

    def _send(self, port: Port, start: int, after: float) -> None:
        """Plan and table, in either order: the connection is reliable, its use need not be."""
        parts = [lambda: self._give_plan(port), lambda: self._give_table(port, start)]
        self.rng.shuffle(parts)
        for part in parts:
            self.clock.after(after, part)
            after += self.rng.random() * 0.02

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
        for port in self.ports:
            self.clock.after(
                self.rng.expovariate(4.0),
                partial(self._give_table, port, start),
            )
        return key

    def arrive(self, rank: int, begun: dict[int, int]) -> None:
        """A rank is at the fence."""
        self.at[rank] = begun
        self._aim()

    def _aim(self) -> None:
        """All are there: what all have begun can complete, and nothing else (E1)."""
        plan = self.plan
        if plan is None or len(self.at.keys() | set(self.joined)) < self.job.workers:
            return
        clocks = dict(plan.versions)
        self.target = {}
        for key in range(len(self.table)):
            start = clocks.get(key, self.table[key].first - 1)
            self.target[key] = min(begun.get(key, start) for begun in self.at.values())

    def consumed(self, rank: int) -> None:
        """A rank has the sums up to the target."""
        self._consumed.add(rank)
        if self._consumed == self.at.keys():
            self._go(self.target or {})

    def join(self, rank: int) -> None:
        """A rank has no more data (E7)."""
        self.joined.append(rank)
        if len(self.joined) == self.job.workers:
            policy = Policy("broadcast", rank)
            self.append(TensorSpec("weights", "float32", "float32", (11,), policy, 1))
        elif self.at:
            self._aim()

    def _go(self, versions: dict[int, int]) -> None:
        """GO: a new plan with packing and other slices, to servers and workers in any order."""
        rng, table, plan = self.rng, self.table, self.plan
        if plan is None:
            return
        packing = [key for key in range(len(table)) if table[key].first <= self.fence]
        rng.shuffle(packing)
        self.plan = plan._replace(
            epoch=plan.epoch + 1, fence=plan.fence + 1, step=self.fence,
            slice_bytes=rng.choice((8, 16, 40, 64)), pack_bytes=rng.choice((0, 40, 100, 400)),
            packing=tuple(packing) if rng.random() < 0.8 else (), packed=len(table),
            versions=tuple(sorted(versions.items())),
        )  # fmt: skip
        self.at.clear()
        self.target = None
        self._consumed.clear()
        self.fence = 0
        for port in self.ports:
            self._send(port, len(port.table), rng.random() * 0.3)
