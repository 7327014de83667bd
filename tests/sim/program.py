"""The training thread of one rank: windows of submissions, fences, a join, the final weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator

from gradsum.scheduler.table import TensorSpec
from gradsum.worker import core as working
from gradsum.worker.rounds import Op
from tests.sim.coordinator import Coordinator
from tests.sim.network import Clock
from tests.sim.oracle import Box, Oracle, Violation, payload
from tests.sim.ports import WorkerPort
from tests.sim.workload import Job

Program = Generator[float | Callable[[], bool], None, None]


class Rank:
    """The training thread of one rank, as a generator that sleeps or waits for a condition."""

    def __init__(
        self, job: Job, clock: Clock, rng: random.Random, coordinator: Coordinator, oracle: Oracle,
        port: WorkerPort,
    ) -> None:  # fmt: skip
        self.job = job
        self.clock = clock
        self.rng = rng
        self.coordinator = coordinator
        self.oracle = oracle
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
            self.clock.after(wanted, self._advance)

    def _look(self) -> None:
        """Conditions are looked at every few milliseconds; the core owes nobody a call."""
        if self._waits is None:
            return
        if self._waits():
            self._advance()
        else:
            self.clock.after(0.01, self._look)

    def _run(self) -> Program:
        job, core, coordinator = self.job, self.port.core, self.coordinator
        for window in range(1, job.last[self.rank] + 1):
            self.where = f"window {window}"
            coordinator.register(window)
            keys = self._keys(window)
            if window in job.fences:
                begun = self._early(keys)
                for key in begun:
                    self._hand_over(key, window, window)
                yield from self._fence(window)
                keys = [key for key in keys if key not in begun]
            yield lambda: len(self._open) <= job.ahead
            yield from self._submit(window, keys)
        self.where = "join"
        yield lambda: not self._open and core.plan is not None and core.idle()
        self.port.step(working.Join())
        yield core.links.joined_everywhere
        coordinator.join(self.rank)
        yield lambda: coordinator.table.key("weights") is not None
        self.where = "weights"
        yield self.rng.random() * 0.2
        self._hand_over(len(coordinator.table) - 1, 1, 99)
        yield lambda: not self._open
        self.port.step(working.Settle())
        yield core.settled

    def _fence(self, window: int) -> Program:
        core, coordinator = self.port.core, self.coordinator
        self.where = f"fence at {window}"
        yield lambda: core.plan is not None and self._broadcasts_done()
        epoch = core.plan.epoch if core.plan else 0
        self.port.step(working.Pause())
        if self.rng.random() < 0.2:
            self.port.step(working.Resume())
            self.port.step(working.Pause())
        yield core.resting
        coordinator.fence = window
        coordinator.arrive(self.rank, core.submitted())
        yield lambda: coordinator.target is not None
        target = coordinator.target or {}
        yield lambda: core.consumed(target)
        coordinator.consumed(self.rank)
        yield lambda: core.plan is not None and core.plan.epoch > epoch

    def _broadcasts_done(self) -> bool:
        """Broadcasts block their callers, so none waits at a fence."""
        table = self.coordinator.table
        return all(table[op.key].policy.kind == "sum" for op in self.port.core.waiting())

    def _early(self, keys: list[int]) -> list[int]:
        """Tensors of this window that this rank begins before the fence: of another optimizer."""
        table = self.coordinator.table
        sums = [key for key in keys if table[key].policy.kind == "sum"]
        return sums[: self.rng.randint(0, len(sums))] if self.rng.random() < 0.6 else []

    def _keys(self, window: int) -> list[int]:
        """What this rank submits in a window, in its own order."""
        rng, table = self.rng, self.coordinator.table
        known = [key for key in range(len(table)) if table[key].first <= window]
        if rng.random() < 0.5:
            rng.shuffle(known)
        limit = min(self.job.last)
        return [key for key in known if table[key].policy.kind == "sum" or window <= limit]

    def _submit(self, window: int, keys: list[int]) -> Program:
        pace = self.rng.choice((0.0, 0.0, 0.01, 0.3))
        for key in keys:
            self._hand_over(key, window, window)
            if pace:
                yield self.rng.random() * pace

    def _hand_over(self, key: int, version: int, window: int) -> None:
        spec = self.coordinator.table[key]
        source = None
        if spec.name == "weights":
            pushes = spec.policy.root == self.rank
        else:
            pushes = self.job.pushes(spec, self.rank, version)
        if pushes:
            source = memoryview(bytearray(payload(spec, key, self.rank, version).tobytes()))
        sink = Box(spec) if spec.policy.reads(self.rank) else None
        self._open[window] = self._open.get(window, 0) + 1
        op = Op(key, spec.name, version, source, sink, key + self.rng.randint(0, 3), window)
        self.port.step(working.Submit(op))

    def _done(self, op: Op, error: Exception | None) -> None:
        if error is not None:
            raise Violation(f"rank {self.rank}: {op.name} version {op.version} failed: {error}")
        spec = self.coordinator.table[op.key]
        if spec.policy.reads(self.rank):
            everybody = range(self.job.workers)
            pushed = [r for r in everybody if self._pushed(spec, r, op.version)]
            self.oracle.judge(self.rank, op, spec, pushed)
        if op.source is not None and op.source.nbytes:  # the caller may write there again
            op.source[:] = b"\x77" * op.source.nbytes
        self._open[op.handle] -= 1
        if not self._open[op.handle]:
            del self._open[op.handle]

    def _pushed(self, spec: TensorSpec, rank: int, version: int) -> bool:
        if spec.name == "weights":
            return rank == spec.policy.root
        return self.job.pushes(spec, rank, version)
