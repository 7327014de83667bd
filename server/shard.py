"""Shard: the thread that gives one Engine its sockets (DESIGN 7).

One thread owns everything: the data and control ROUTERs, the connection to the coordinator and the
slots, so there are no locks; libzmq's I/O thread receives while this one adds. It sleeps in poll
and never spins. Frames that break the protocol are counted, logged at a limited rate, and harm
nobody.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import threading
import time
from typing import Any, Final

import zmq

from gradsum.config import Settings
from gradsum.errors import GradsumError, ProtocolError, Refused, Unreachable
from gradsum.log import RateLimited
from gradsum.proto import control, data, peer
from gradsum.proto.address import Address, parse_address
from gradsum.proto.control import CONTROL
from gradsum.proto.data import decode_header, encode_header
from gradsum.proto.dtypes import HALVES
from gradsum.proto.limits import PROTOCOL
from gradsum.proto.transport.sockets import (
    CONTROL_LIMIT,
    DATA_LIMIT,
    bind_router,
    connect_dealer,
    new_context,
)
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.table import TensorSpec, parse_spec
from gradsum.server.adder import Adder
from gradsum.server.bindings import Bindings
from gradsum.server.engine import (
    Adopt,
    Attached,
    Engine,
    Extend,
    FetchPlan,
    Frame,
    Records,
    Reset,
    SendSum,
    Tick,
)

BATCH: Final = 32
HELLO_REPEAT: Final = 1.0
FETCH_REPEAT: Final = 0.2

log = logging.getLogger("gradsum.server")


class Shard:
    """Runs in its process's main thread until ``stop`` or, with ``once``, the end of one job."""

    def __init__(self, settings: Settings, once: bool) -> None:
        if settings.coordinator is None:
            raise ProtocolError("a server needs the coordinator's address")
        self._settings = settings
        self._once = once
        self._coordinator_address = parse_address(settings.coordinator, "coordinator")
        self._context = new_context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bindings = Bindings()
        self._engine = Engine(
            window=settings.credit_bytes, skew=settings.skew_bytes,
            park_bytes=settings.park_bytes, heartbeat=settings.heartbeat, adder=Adder(),
        )  # fmt: skip
        self._welcome: control.Welcome | None = None
        self._heard = self._next_beat = time.monotonic()
        self._next_fetch = 0.0
        self._exit: int | None = None
        self._limited = RateLimited(log, 5.0)
        self._open_sockets()

    def _open_sockets(self) -> None:
        settings = self._settings
        self._data, data_at = self._bind(DATA_LIMIT)
        self._control, control_at = self._bind(CONTROL_LIMIT)
        host = settings.advertise or data_at.host
        self.address = Address(host, data_at.port)
        self._hello = control.Hello(
            PROTOCOL, "server", "", None, None, socket.gethostname(), os.getpid(),
            settings.restart_count, Address(host, data_at.port).endpoint,
            Address(host, control_at.port).endpoint, b"",
        )  # fmt: skip
        self._coordinator = connect_dealer(
            self._context, self._coordinator_address, max_message=CONTROL_LIMIT,
            heartbeat=settings.suspect,
        )  # fmt: skip
        self._poller = zmq.Poller()
        for waits in (self._data, self._control, self._coordinator, self._wake):
            self._poller.register(waits, zmq.POLLIN)

    def _bind(self, limit: int) -> tuple[Any, Address]:
        return bind_router(
            self._context, self._settings.bind, 0, max_message=limit,
            insecure=self._settings.insecure, heartbeat=self._settings.suspect,
        )  # fmt: skip

    def stop(self) -> None:
        """End soon; may be called from a signal handler."""
        self._exit = 0
        os.eventfd_write(self._wake, 1)

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> int:
        """Serve jobs; the exit code. Raises Unreachable or Refused for what ends a server."""
        self._say(self._hello)
        try:
            while self._exit is None:
                self._turn()
            self._say(control.Leave("shutdown"))
            return self._exit
        finally:
            self._coordinator.close(500)
            self._data.close(500)
            self._control.close(500)
            self._context.term()
            os.close(self._wake)

    def _turn(self) -> None:
        now = time.monotonic()
        self._drain(now)
        events = dict(self._poller.poll(self._patience(now)))
        now = time.monotonic()
        if self._wake in events:
            os.eventfd_read(self._wake)
        if self._coordinator in events:
            self._hear_coordinator(now)
        if self._control in events:
            self._take(self._control, self._hear, now)
        if self._data in events:
            self._take(self._data, self._receive, now)
        self._tick(now)

    def _patience(self, now: float) -> int:
        due = min(self._engine.next_deadline(now), self._next_beat)
        return max(0, min(int((due - now) * 1000) + 1, 1_000))

    def _take(self, source: Any, handle: Any, now: float) -> None:
        """A batch of messages of one socket, each judged on its own."""
        for _ in range(BATCH):
            try:
                frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                handle(frames, now)
            except GradsumError as error:
                self._engine.counters["rejected"] += 1
                self._limited.log(logging.WARNING, type(error).__name__, "%s", error.message)

    def _carry_out(self, actions: list[Any], now: float) -> None:
        for action in actions:
            if isinstance(action, SendSum):
                self._send(action)
            elif isinstance(action, FetchPlan) and now >= self._next_fetch:
                self._next_fetch = now + FETCH_REPEAT
                self._say(control.FetchPlan(action.start))

    def _step(self, event: Any, now: float) -> None:
        self._carry_out(self._engine.step(event, now), now)

    # -- workers ------------------------------------------------------------------------------

    def _receive(self, frames: list[Any], now: float) -> None:
        if not 2 <= len(frames) <= 3:
            raise ProtocolError(f"{len(frames)} frames in a data message")
        sender = frames[0].bytes
        header = decode_header(frames[1].buffer)
        if header.kind == data.ATTACH:
            if self._engine.owns(header.rank, header.incarnation, header.mask):
                both = self._bindings.bind_data(sender, header.rank, header.generation)
                self._attached(both, header.rank, header.generation, now)
            return
        bound = self._bindings.data(sender)
        if bound is None:
            self._strange(header.rank)
            return
        if bound.rank != header.rank:
            raise ProtocolError(f"rank {bound.rank} sent {header}", peer=f"worker {bound.rank}")
        payload = frames[2] if len(frames) == 3 else None
        self._step(Frame(bound.rank, header, payload), now)

    def _hear(self, frames: list[Any], now: float) -> None:
        if len(frames) != 2:
            raise ProtocolError(f"{len(frames)} frames in a control message")
        sender = frames[0].bytes
        envelope = peer.decode_envelope(frames[1].buffer)
        first = envelope.records[0] if envelope.records else None
        if isinstance(first, peer.Attach):
            if not self._engine.owns(envelope.rank, envelope.incarnation, first.token):
                return
            both = self._bindings.bind_control(sender, envelope.rank, envelope.generation)
            self._attached(both, envelope.rank, envelope.generation, now)
        bound = self._bindings.control(sender)
        if bound is None:
            self._send_control(sender, envelope.rank, envelope.generation, (peer.Stranger(),))
            return
        if bound.rank != envelope.rank or bound.generation != envelope.generation:
            raise ProtocolError(f"rank {bound.rank} sent an envelope of rank {envelope.rank}")
        plan = self._engine.plan
        if plan is None or (envelope.job, envelope.incarnation) != (
            plan.job, plan.members.get(bound.rank)
        ):  # fmt: skip
            raise ProtocolError(f"rank {bound.rank} sent an envelope of another life or job")
        records = tuple(r for r in envelope.records if not isinstance(r, peer.Attach))
        self._step(Records(bound.rank, envelope.epoch, records), now)

    def _attached(self, both: bool, rank: int, generation: int, now: float) -> None:
        if both:
            self._step(Attached(rank, generation), now)

    def _strange(self, rank: int) -> None:
        """A data connection that we do not know: its worker is told by the control connection."""
        target = self._bindings.control_peer(rank)
        bound = None if target is None else self._bindings.control(target)
        if target is not None and bound is not None:
            self._send_control(target, rank, bound.generation, (peer.Stranger(),))

    def _send(self, action: SendSum) -> None:
        target = self._bindings.data_peer(action.rank)
        if target is None:
            return
        head = encode_header(action.header)
        try:
            self._data.send(target, zmq.SNDMORE)
            if action.payload is None:
                self._data.send(head)
            else:
                self._data.send(head, zmq.SNDMORE)
                self._data.send(action.payload, copy=False)
        except zmq.ZMQError:  # unroutable: the connection is gone, the worker makes a new one
            self._bindings.drop_data(action.rank)
            self._strange(action.rank)

    def _drain(self, now: float) -> None:
        for rank, records in self._engine.drain(now).items():
            target = self._bindings.control_peer(rank)
            bound = None if target is None else self._bindings.control(target)
            if target is not None and bound is not None:
                self._send_control(target, rank, bound.generation, tuple(records))

    def _send_control(
        self, target: bytes, rank: int, generation: int, records: tuple[Any, ...]
    ) -> None:
        plan, welcome = self._engine.plan, self._welcome
        envelope = peer.Envelope(
            PROTOCOL, plan.job if plan else "", plan.epoch if plan else 0, rank,
            plan.members.get(rank, 0) if plan else 0, welcome.incarnation if welcome else 0,
            generation, records,
        )  # fmt: skip
        try:
            self._control.send(target, zmq.SNDMORE)
            self._control.send(peer.encode_envelope(envelope))
        except zmq.ZMQError:
            self._bindings.drop_control(rank)

    # -- the coordinator ----------------------------------------------------------------------

    def _say(self, message: Any) -> None:
        self._coordinator.send(CONTROL.encode(message))

    def _tick(self, now: float) -> None:
        if now >= self._engine.next_deadline(now):
            self._step(Tick(), now)
        if now < self._next_beat:
            return
        settings = self._settings
        silent = now - self._heard
        if self._welcome is None:
            self._next_beat = now + HELLO_REPEAT
            self._say(self._hello)
            if silent > settings.connect_timeout:
                self._lost(f"does not answer ({silent:.0f} s)", now)
            return
        self._next_beat = now + self._welcome.heartbeat
        engine = self._engine
        self._say(
            control.Heartbeat(
                self._welcome.token, 0, engine.plan.epoch if engine.plan else 0,
                len(engine.table), engine.table.digest, 0.0, dict(engine.counters),
            )
        )  # fmt: skip
        if silent > self._welcome.lease:
            self._lost(f"has been silent for {silent:.1f} s", now)

    def _lost(self, how: str, now: float) -> None:
        """The coordinator is gone: a server of one job ends, a standing one waits for the next."""
        text = f"the coordinator at {self._coordinator_address} {how}"
        if self._once or self._welcome is None:
            raise Unreachable(
                text, peer=str(self._coordinator_address),
                hint="is it running there? gradsum coordinator --bind HOST:PORT",
            )
        log.warning("%s; waiting for it to come back", text)
        self._forget(now)

    def _forget(self, now: float) -> None:
        self._welcome = None
        self._hello = self._hello._replace(token=b"")
        self._heard = now + 1e9  # a standing server waits without end, by design
        self._reset(now)

    def _reset(self, now: float) -> None:
        self._step(Reset(), now)
        self._bindings.clear()

    def _hear_coordinator(self, now: float) -> None:
        while True:
            try:
                message = CONTROL.decode(self._coordinator.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._heard = now
            self._obey(message, now)

    def _obey(self, message: Any, now: float) -> None:
        match message:
            case control.Welcome():
                self._welcomed(message, now)
            case control.Refusal() if self._welcome is None:
                raise Refused(message.message, hint=message.hint)
            case control.Refusal():
                self._forget(now)
            case control.PlanMessage():
                self._adopt(message, now)
            case control.TableMessage():
                specs = tuple(map(parse_spec, message.specs))
                self._prepare(specs)
                self._step(Extend(message.start, specs), now)
            case control.HeartbeatReply():
                engine = self._engine
                behind = engine.plan is not None and message.epoch > engine.plan.epoch
                if behind or message.table > len(engine.table):
                    self._carry_out([FetchPlan(len(engine.table))], now)
            case control.JobEnd():
                self._job_over(message, now)
            case control.Waiting():
                log.info("%s", message.text)

    def _prepare(self, specs: tuple[TensorSpec, ...]) -> None:
        """Import torch beside the loop when a half type is announced: 2-3 s of silence in the loop
        would look like a dead server."""
        if "torch" not in sys.modules and any(spec.wire in HALVES for spec in specs):
            threading.Thread(target=importlib.import_module, args=("torch",), daemon=True).start()

    def _welcomed(self, message: control.Welcome, now: float) -> None:
        if self._welcome is None:
            log.info(
                "server %d ready on %s (protocol %d)", message.rank, self.address, PROTOCOL
            )
        self._welcome = message
        self._hello = self._hello._replace(token=message.token)

    def _adopt(self, message: control.PlanMessage, now: float) -> None:
        """Nothing is served before a plan names this incarnation (I4)."""
        welcome = self._welcome
        if welcome is None or message.coordinator != welcome.coordinator:
            return
        for place, info in enumerate(message.servers):
            if (info.number, info.incarnation) == (welcome.rank, welcome.incarnation):
                self._step(Adopt(Plan.of(message), place), now)
                self._say(control.PlanAck(message.epoch))

    def _job_over(self, message: control.JobEnd, now: float) -> None:
        log.info("job %r %s", message.job, "failed" if message.failed else "ended")
        self._reset(now)
        if self._once:
            self._exit = int(message.failed)
