"""Small pieces for scenarios: a plan, one Engine or one Core on its own, by events and actions."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsum.proto import data, peer
from gradsum.proto.control import PlanMessage, ServerInfo
from gradsum.proto.data import Header
from gradsum.proto.dtypes import CODES
from gradsum.proto.limits import PROTOCOL
from gradsum.scheduler.credit import Bounds
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import TensorSpec
from gradsum.server import engine as serving
from gradsum.server.adder import Adder
from gradsum.worker import core as working
from gradsum.worker.rounds import Op
from tests.sim.oracle import Box

WINDOW = 1 << 20


def spec(
    name: str = "t", elements: int = 4, wire: str = "float32", policy: Policy | None = None,
    first: int = 1,
) -> TensorSpec:  # fmt: skip
    """A one-dimensional tensor."""
    return TensorSpec(name, wire, wire, (elements,), policy or Policy(), first)


def plan(workers: int = 2, servers: int = 1, epoch: int = 1, **changes: Any) -> Plan:
    """A plan of equal servers; slices of 1 KiB unless changed."""
    message = PlanMessage(
        coordinator="c", job="j", epoch=epoch,
        members=tuple((rank, 10 + rank) for rank in range(workers)),
        servers=tuple(ServerInfo(i, 100 + i, "", "", 1.0) for i in range(servers)),
        slice_bytes=1024, pack_bytes=0, packing=(), packed=0, fence=0, step=0, versions=(),
        deterministic=False,
        tokens=tuple((rank, b"token%d" % rank) for rank in range(workers)),
    )  # fmt: skip
    return Plan.of(message._replace(**changes))


def array(*values: float, wire: str = "float32") -> bytearray:
    """Bytes of a payload."""
    return bytearray(np.array(values, dtype=wire).tobytes())


def values(payload: Any, wire: str = "float32") -> list[float]:
    """What a payload says."""
    found: list[float] = np.frombuffer(payload, wire).tolist()
    return found


class OneServer:
    """An Engine with attached workers; ``sums`` and ``told`` collect what leaves."""

    def __init__(
        self, *specs: TensorSpec, workers: int = 2, park: int = 1 << 20, window: int = WINDOW,
        skew: int = WINDOW, **changes: Any,
    ) -> None:  # fmt: skip
        self.now = 100.0
        self.workers = workers
        self.engine = serving.Engine(
            bounds=Bounds(window, skew), park_bytes=park, heartbeat=0.5, adder=Adder()
        )
        self.sums: list[serving.SendSum] = []
        self.fetched = 0
        self.told: dict[int, list[Any]] = {rank: [] for rank in range(workers)}
        self._offsets: dict[int, int] = {}
        self._seq = 0
        self.step(serving.Extend(0, specs or (spec(),)))
        self.step(serving.Adopt(plan(workers, **changes), 0))
        for rank in range(workers):
            self.attach(rank)
        self.clear()

    def step(self, event: serving.Event) -> list[serving.Action]:
        """One event; records of its batch go to ``told``."""
        actions = self.engine.step(event, self.now)
        for action in actions:
            if isinstance(action, serving.SendSum):
                self.sums.append(action)
            else:
                self.fetched += 1
        for rank, records in self.engine.drain(self.now).items():
            self.told[rank] += records
        return actions

    def attach(self, rank: int, generation: int = 1, window: int = WINDOW) -> None:
        """A connection with credit for sums."""
        self._offsets[rank] = 0
        self.step(serving.Attached(rank, generation, False))
        self.say(rank, peer.Credit(generation, 0, window, window))

    def clear(self) -> None:
        """Forget what has left."""
        self.sums.clear()
        for records in self.told.values():
            records.clear()

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.step(serving.Tick())

    def say(self, rank: int, *records: Any, epoch: int | None = None) -> None:
        """Control records of a worker."""
        current = self.engine.plan.epoch if self.engine.plan else 0
        self.step(serving.Records(rank, current if epoch is None else epoch, records))

    def push(
        self, rank: int, version: int, payload: Any, *, key: int = 0, index: int = 0,
        epoch: int | None = None, mask: bytes = b"", generation: int = 1, wire: str = "float32",
        priority: int = 0,
    ) -> None:  # fmt: skip
        """A PUSH, or with payload None an ABSENT."""
        self._seq += 1
        length = 0 if payload is None else len(payload)
        self._offsets[rank] += length + 256
        current = self.engine.plan.epoch if self.engine.plan else 0
        header = Header(
            data.ABSENT if payload is None else data.PUSH, PROTOCOL, "j",
            current if epoch is None else epoch, key, index, version, rank, 10 + rank, 100,
            generation, self._offsets[rank], self._seq, priority, CODES[wire], 0, length,
            self.workers, int(payload is not None), mask, 0,
        )  # fmt: skip
        self.step(serving.Frame(rank, header, payload))

    def heard(self, rank: int, kind: type[Any]) -> list[Any]:
        """Records of a kind that a rank was told."""
        return [record for record in self.told[rank] if isinstance(record, kind)]


class OneWorker:
    """A Core with open connections; ``sent``, ``done``, ``failed`` and ``said`` collect."""

    def __init__(
        self, *specs: TensorSpec, rank: int = 0, workers: int = 2, servers: int = 1,
        window: int = WINDOW, credit: int = WINDOW, **changes: Any,
    ) -> None:  # fmt: skip
        self.now = 100.0
        self.core = working.Core(
            rank, 10 + rank, b"token%d" % rank, bounds=Bounds(window), heartbeat=0.5
        )
        self.specs = specs or (spec(),)
        self.sent: list[working.SendPush] = []
        self.done: list[Op] = []
        self.failed: list[working.Fail] = []
        self.other: list[Any] = []
        self.said: dict[int, list[Any]] = {server: [] for server in range(servers)}
        self.step(working.Extend(0, self.specs))
        self.step(working.Adopt(plan(workers, servers, **changes)))
        for server in range(servers):
            self.step(working.Connected(server, 1, False))
            self.tell(
                server, peer.Attached(1, False), peer.Credit(1, 0, credit, credit)
            )
        self.clear()

    def step(self, event: Any) -> None:
        """One event; actions and records are collected."""
        for action in self.core.step(event, self.now):
            match action:
                case working.SendPush():
                    self.sent.append(action)
                case working.Complete():
                    self.done.append(action.op)
                case working.Fail():
                    self.failed.append(action)
                case working.Deliver():
                    action.sink.write(
                        action.offset, action.payload, action.members, action.exponent
                    )
                case _:
                    self.other.append(action)
        for server, records in self.core.drain(self.now).items():
            self.said[server] += records

    def clear(self) -> None:
        """Forget what has left."""
        for collected in (self.sent, self.done, self.failed, self.other, *self.said.values()):
            collected.clear()  # type: ignore[attr-defined]

    def tick(self, seconds: float) -> None:
        """Time passes, every deadline on the way is kept."""
        end = self.now + seconds
        while (due := self.core.next_deadline()) <= end:
            self.now = max(due, self.now)
            self.step(working.Tick())
        self.now = end

    def tell(self, server: int, *records: Any, epoch: int | None = None) -> None:
        """Control records of a server."""
        current = self.core.plan.epoch if self.core.plan else 0
        self.step(
            working.Records(server, current if epoch is None else epoch, 100 + server, records)
        )

    def submit(
        self, version: int, payload: Any, *, key: int = 0, priority: int = 0, sink: bool = True
    ) -> Op:
        """Hand over an operation; payload None is ABSENT, or a reader."""
        one = self.core.table[key]
        source = None if payload is None else memoryview(payload)
        op = Op(key, one.name, version, source, Box(one) if sink else None, priority)
        self.step(working.Submit(op))
        return op

    def sum(
        self, version: int, payload: Any, *, key: int = 0, index: int = 0, server: int = 0,
        present: int | None = None, epoch: int | None = None, incarnation: int | None = None,
        mask: bytes = b"", offset: int = 0, generation: int = 1, members: int = 2,
        exponent: int = 0,
    ) -> None:  # fmt: skip
        """A sum arrives."""
        length = 0 if payload is None else len(payload)
        current = self.core.plan.epoch if self.core.plan else 0
        header = Header(
            data.SUM, PROTOCOL, "j", current if epoch is None else epoch, key, index, version,
            self.core.rank, self.core.incarnation,
            100 + server if incarnation is None else incarnation, generation, offset, 1, 0,
            1, exponent, length, members,
            (2 if payload is not None else 0) if present is None else present, mask, 0,
        )  # fmt: skip
        view = None if payload is None else memoryview(payload)
        self.step(working.SumFrame(server, header, view))

    def heard(self, kind: type[Any], server: int = 0) -> list[Any]:
        """Records of a kind that a server was told."""
        return [record for record in self.said[server] if isinstance(record, kind)]

    def receipt(self, sent: working.SendPush) -> None:
        """The receipt of a push."""
        h = sent.header
        self.tell(sent.server, peer.Receipt(h.key, h.slice, h.version, h.seq))
