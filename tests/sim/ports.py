"""What the shells do, in memory: frames in, events to the core or engine, actions out as frames.

Every message is really encoded and decoded. Payloads are zero-copy as in the processes: what a
receiver gets is the sender's memory at the moment of *delivery*, so memory that is written too
early shows as a wrong sum. Connections are bound by the same Bindings that the server uses.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from gradsum.errors import ProtocolError
from gradsum.proto import data, peer
from gradsum.proto.data import Header, decode_header, encode_header
from gradsum.proto.limits import PROTOCOL
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.table import Table
from gradsum.server import engine as serving
from gradsum.server.bindings import Bindings
from gradsum.server.engine import Engine
from gradsum.worker import core as working
from gradsum.worker.core import Core
from tests.sim.network import Clock, Network
from tests.sim.pool import Pool

JOB = "sim"
Fetch = Callable[[Any, int], None]


class Port:
    """Batches what drain gives and wakes the machine at its deadline."""

    def __init__(self, clock: Clock, network: Network, rng: random.Random, fetch: Fetch) -> None:
        self.clock = clock
        self.network = network
        self.rng = rng
        self.fetch = fetch
        self._flushing = False
        self._alarm = float("inf")

    def soon(self) -> None:
        """Have the records sent and the alarm set; several events may share one batch."""
        if not self._flushing:
            self._flushing = True
            self.clock.after(self.rng.choice((0.0, 0.0, 0.0005, 0.003)), self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self.flush()
        due = self.deadline()
        if due < self._alarm:
            self._alarm = due
            self.clock.at(due, self._wake)

    def _wake(self) -> None:
        if self.clock.now < self._alarm:
            return
        self._alarm = float("inf")
        if self.clock.now >= self.deadline():
            self.tick()
        self.soon()

    def flush(self) -> None:
        """Send what drain gives."""
        raise NotImplementedError

    def tick(self) -> None:
        """A deadline has passed."""
        raise NotImplementedError

    def deadline(self) -> float:
        """When tick is due."""
        raise NotImplementedError


class ServerPort(Port):
    """One shard's shell (mirrors server/shard.py)."""

    def __init__(self, engine: Engine, incarnation: int, pool: Pool, **common: Any) -> None:
        super().__init__(**common)
        self.pool = pool
        self.engine = engine
        self.incarnation = incarnation
        self.bindings = Bindings()
        self.peers: dict[bytes, Callable[[bytes, Any], None]] = {}
        self.rejected: list[str] = []

    @property
    def table(self) -> Table:
        """What this server knows of the table."""
        return self.engine.table

    def deadline(self) -> float:
        return self.engine.next_deadline(self.clock.now)

    def tick(self) -> None:
        self.step(serving.Tick())

    def step(self, event: Any) -> None:
        """Give the engine an event and carry out its actions."""
        for action in self.engine.step(event, self.clock.now):
            if isinstance(action, serving.SendSum):
                self._send(action)
            else:
                self.fetch(self, action.start)
        self.soon()

    def receive(self, route: bytes, raw: bytes, payload: Any) -> None:
        """A data message arrived by a route."""
        header = decode_header(raw)
        if header.kind == data.ATTACH:
            if self.engine.owns(header.rank, header.incarnation, header.mask):
                if self.bindings.bind_data(route, header.rank, header.generation):
                    self.step(serving.Attached(header.rank, header.generation, False))
            return
        bound = self.bindings.data(route)
        if bound is None:
            self._strange(header.rank)
        else:
            self.step(serving.Frame(bound.rank, header, payload))

    def hear(self, route: bytes, raw: bytes) -> None:
        """A control envelope arrived by a route."""
        envelope = peer.decode_envelope(raw)
        first = envelope.records[0] if envelope.records else None
        if isinstance(first, peer.Attach):
            if not self.engine.owns(envelope.rank, envelope.incarnation, first.token):
                return
            if self.bindings.bind_control(route, envelope.rank, envelope.generation):
                self.step(serving.Attached(envelope.rank, envelope.generation, False))
        bound = self.bindings.control(route)
        if bound is None:
            self._tell(route, envelope.rank, envelope.generation, (peer.Stranger(),))
            return
        records = tuple(r for r in envelope.records if not isinstance(r, peer.Attach))
        self.step(serving.Records(bound.rank, envelope.epoch, records))

    def _strange(self, rank: int) -> None:
        """A data connection that nobody answers for: its worker is told to make a new one."""
        target = self.bindings.control_peer(rank)
        bound = None if target is None else self.bindings.control(target)
        if target is not None and bound is not None:
            self._tell(target, rank, bound.generation, (peer.Stranger(),))

    def _send(self, action: serving.SendSum) -> None:
        target = self.bindings.data_peer(action.rank)
        if target not in self.peers:  # unroutable
            self.bindings.drop_data(action.rank)
            self._strange(action.rank)
            return
        raw, payload = encode_header(action.header), action.payload
        read = (lambda: None) if payload is None else self.pool.lay(payload)
        self._carry("sums", target, raw, read)

    def _carry(self, channel: str, target: bytes, raw: bytes, payload: Callable[[], Any]) -> None:
        def deliver() -> None:
            if target in self.peers:
                self.peers[target](raw, payload())

        self.network.carry(channel, deliver)

    def flush(self) -> None:
        for rank, records in self.engine.drain(self.clock.now).items():
            target = self.bindings.control_peer(rank)
            bound = None if target is None else self.bindings.control(target)
            if target is not None and bound is not None:
                self._tell(target, rank, bound.generation, tuple(records))

    def _tell(self, target: bytes, rank: int, generation: int, records: tuple[Any, ...]) -> None:
        plan = self.engine.plan
        envelope = peer.Envelope(
            PROTOCOL, JOB, plan.epoch if plan else 0, rank,
            plan.members.get(rank, 0) if plan else 0, self.incarnation, generation, records,
        )  # fmt: skip
        if target in self.peers:
            self._carry("down", target, peer.encode_envelope(envelope), lambda: ...)
        else:
            self.bindings.drop_control(rank)


class WorkerPort(Port):
    """One worker's shell (mirrors worker/comm.py)."""

    def __init__(
        self, core: Core, token: bytes, servers: list[ServerPort], placed: bool, **common: Any
    ) -> None:
        super().__init__(**common)
        self.placed = placed
        self.core = core
        self.token = token
        self.servers = servers
        self.generations = [0] * len(servers)
        self._routes: dict[tuple[int, str], bytes] = {}
        self._opened = 0
        self.done: Callable[[Any, Any], None] = lambda op, error: None

    @property
    def table(self) -> Table:
        """What this worker knows of the table."""
        return self.core.table

    def deadline(self) -> float:
        return self.core.next_deadline()

    def tick(self) -> None:
        self.step(working.Tick())

    def connect(self, server: int) -> None:
        """New sockets: messages of the old ones reach nobody here any more (F6)."""
        self.generations[server] += 1
        for kind in ("data", "control"):
            self.reroute(server, kind)
        self.step(working.Connected(server, self.generations[server], False))

    def reroute(self, server: int, kind: str) -> None:
        """The socket connects again by itself, as ZeroMQ's do: to the server it is a stranger."""
        peers = self.servers[server].peers
        old = self._routes.get((server, kind))
        if old is not None:
            del peers[old]
        self._opened += 1
        route = f"{kind}/{self.core.rank}/{self._opened}".encode()
        self._routes[server, kind] = route
        peers[route] = self._receiver(server)

    def _receiver(self, server: int) -> Callable[[bytes, Any], None]:
        def receive(raw: bytes, payload: Any) -> None:
            if payload is ...:
                envelope = peer.decode_envelope(raw)
                event: Any = working.Records(
                    server, envelope.epoch, envelope.server_incarnation, envelope.records
                )
            else:
                view = None if payload is None else memoryview(payload)
                event = working.SumFrame(server, decode_header(raw), view)
            self.step(event)

        return receive

    def step(self, event: Any) -> None:
        """Give the core an event and carry out its actions."""
        for action in self.core.step(event, self.clock.now):
            self._carry_out(action)
        self.soon()

    def _carry_out(self, action: working.Action) -> None:
        match action:
            case working.SendPush():
                self._send(action.server, action.header, action.payload)
            case working.Deliver():
                action.sink.write(
                    action.offset, action.payload, action.members, action.exponent
                )
            case working.Complete():
                self.done(action.op, None)
            case working.Fail():
                self.done(action.op, action.error)
            case working.SendAttach():
                plan = self._plan()
                self._send(
                    action.server,
                    data.attach(
                        JOB, plan.epoch, self.core.rank, self.core.incarnation,
                        self.generations[action.server], self.token,
                    ), None,
                )  # fmt: skip
            case working.Reconnect():
                self.connect(action.server)
            case working.FetchPlan():
                self.fetch(self, action.start)

    def _plan(self) -> Plan:
        if self.core.plan is None:
            raise ProtocolError("no plan yet")
        return self.core.plan

    def _send(self, server: int, header: Header, payload: memoryview | None) -> None:
        raw, route = encode_header(header), self._routes[server, "data"]
        port = self.servers[server]
        copy: Callable[[Any], Any] = bytearray if self.rng.random() < 0.8 else bytes
        if self.placed:
            copy = memoryview.toreadonly  # the server reads what lies there whenever it adds
        self.network.carry(
            "pushes",
            lambda: port.receive(route, raw, None if payload is None else copy(payload)),
        )

    def flush(self) -> None:
        core = self.core
        for server, records in core.drain(self.clock.now).items():
            envelope = peer.Envelope(
                PROTOCOL, JOB, self._plan().epoch, core.rank, core.incarnation,
                self.servers[server].incarnation, self.generations[server], tuple(records),
            )  # fmt: skip
            self._say(server, peer.encode_envelope(envelope))

    def _say(self, server: int, raw: bytes) -> None:
        route, port = self._routes[server, "control"], self.servers[server]
        self.network.carry("up", lambda: port.hear(route, raw))
