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
from contextlib import suppress
from typing import Any, Final

import zmq

from gradsum.config import Settings
from gradsum.errors import GradsumError, ProtocolError
from gradsum.log import RateLimited
from gradsum.proto import control, data, peer
from gradsum.proto.address import Address, parse_address
from gradsum.proto.control import CONTROL
from gradsum.proto.data import decode_header, encode_header
from gradsum.proto.dtypes import HALVES
from gradsum.proto.limits import PROTOCOL
from gradsum.proto.transport.shared import SharedMemory
from gradsum.proto.transport.sockets import (
    CONTROL_LIMIT,
    DATA_LIMIT,
    bind_router,
    connect_dealer,
    new_context,
)
from gradsum.scheduler.credit import Bounds
from gradsum.scheduler.schedule import SCHEDULES
from gradsum.scheduler.table import TensorSpec
from gradsum.server.adder import Adder
from gradsum.server.bindings import Bindings, Bound
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
from gradsum.server.membership import Membership
from gradsum.server.neighbours import Neighbours
from gradsum.server.timeline import Timeline
from gradsum.trace import Trace

BATCH: Final = 32
TURN: Final = 0.05
"""Messages of one socket, and seconds, after which the others have their turn."""

COLLECT: Final = 0.002
"""Seconds that receipts wait for company: each envelope costs a wake-up of its reader."""

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
        self._neighbours = Neighbours(SharedMemory(settings.transport != "tcp"))
        self._engine = Engine(
            bounds=Bounds(settings.credit_bytes, settings.skew_bytes),
            park_bytes=settings.park_bytes, heartbeat=settings.heartbeat,
            adder=Adder(self._neighbours.memory.take), schedule=SCHEDULES[settings.schedule],
        )  # fmt: skip
        trace = Trace.of(settings.trace, "server")
        self._timeline = None if trace is None else Timeline(trace, self._engine)
        self._exit: int | None = None
        self._drain_by: float | None = None
        self._limited = RateLimited(log, 5.0)
        self._open_sockets()

    def _open_sockets(self) -> None:
        settings = self._settings
        self._data, data_at = self._bind(DATA_LIMIT)
        self._control, control_at = self._bind(CONTROL_LIMIT)
        host = settings.advertise or data_at.host
        self.address = Address(host, data_at.port)
        hello = control.Hello(
            PROTOCOL, "server", "", None, None, socket.gethostname(), os.getpid(),
            settings.restart_count, Address(host, data_at.port).endpoint,
            Address(host, control_at.port).endpoint, b"", self._neighbours.memory.home,
        )  # fmt: skip
        self._membership = Membership(
            hello, str(self._coordinator_address), settings.connect_timeout, self._once,
            time.monotonic(),
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
        self._take_news(time.monotonic())
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
            self._neighbours.memory.close()
            os.close(self._wake)
            self._write_trace()

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
        due = min(self._engine.next_deadline(now), self._membership.next_deadline())
        if self._drain_by is not None:
            due = min(due, self._drain_by)
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
            if time.monotonic() - now > TURN:
                return

    def _carry_out(self, actions: list[Any], now: float) -> None:
        for action in actions:
            if isinstance(action, SendSum):
                if self._timeline is None:
                    self._send(action)
                else:
                    self._timeline.sends(action, self._send)
            elif isinstance(action, FetchPlan):
                self._membership.fetch(action.start, now)

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
        if header.kind == data.PLACED_PUSH:
            header = header._replace(kind=data.PUSH)
            payload = self._read(bound, payload, header.length)
        frame = Frame(bound.rank, header, payload)
        if self._timeline is None:
            self._step(frame, now)
        else:
            self._carry_out(self._timeline.step(frame, now), now)

    def _read(self, bound: Bound, place: Any, length: int) -> memoryview:
        """A payload in a neighbour's memory; a worker whose memory cannot be read is told."""
        try:
            return self._neighbours.read(bound.rank, b"" if place is None else place.buffer, length)
        except ProtocolError:
            self._engine.counters["unmapped"] += 1
            self._tell_rank(bound.rank, peer.Unmapped())
            raise

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
            self._neighbours.greet(envelope.rank, first)
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
            self._step(Attached(rank, generation, rank in self._neighbours), now)

    def _strange(self, rank: int) -> None:
        """A data connection that we do not know: its worker is told by the control connection."""
        self._tell_rank(rank, peer.Stranger())

    def _tell_rank(self, rank: int, *records: Any) -> None:
        target = self._bindings.control_peer(rank)
        bound = None if target is None else self._bindings.control(target)
        if target is not None and bound is not None:
            self._send_control(target, rank, bound.generation, records)

    def _send(self, action: SendSum) -> None:
        target = self._bindings.data_peer(action.rank)
        if target is None:
            self._strange(action.rank)
            return
        header, payload = action.header, action.payload
        place = None if payload is None else self._neighbours.lay(action.rank, payload)
        if place is not None:
            header = header._replace(kind=data.PLACED_SUM)
        try:
            self._data.send(target, zmq.SNDMORE)
            if payload is None:
                self._data.send(encode_header(header))
            else:
                self._data.send(encode_header(header), zmq.SNDMORE)
                self._data.send(place or payload, copy=False)
        except zmq.ZMQError:  # unroutable: the connection is gone, the worker makes a new one
            self._bindings.drop_data(action.rank)
            self._strange(action.rank)

    def _drain(self, now: float) -> None:
        """Send records, at once when somebody waits for one, else in company."""
        if not self._engine.pressing(now):
            if self._drain_by is None and self._engine.waiting:
                self._drain_by = now + COLLECT
            if self._drain_by is None or now < self._drain_by:
                return
        self._drain_by = None
        for rank, records in self._engine.drain(now).items():
            self._tell_rank(rank, *records)

    def _send_control(
        self, target: bytes, rank: int, generation: int, records: tuple[Any, ...]
    ) -> None:
        plan, welcome = self._engine.plan, self._membership.welcome
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
        """Never blocks: a standing server says hello to an absent coordinator for days."""
        with suppress(zmq.Again):
            self._coordinator.send(CONTROL.encode(message), zmq.NOBLOCK)

    def _tick(self, now: float) -> None:
        engine = self._engine
        if now >= engine.next_deadline(now):
            self._step(Tick(), now)
        self._membership.tick(
            now, self._epoch(), len(engine.table), engine.table.digest, engine.info()
        )
        self._take_news(now)

    def _epoch(self) -> int:
        return self._engine.plan.epoch if self._engine.plan else 0

    def _hear_coordinator(self, now: float) -> None:
        while True:
            try:
                message = CONTROL.decode(self._coordinator.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._membership.received(message, self._epoch(), len(self._engine.table), now)
            self._take_news(now)

    def _take_news(self, now: float) -> None:
        """Events first: an acknowledged plan is in force."""
        membership = self._membership
        for event in membership.events:
            if isinstance(event, Extend):
                self._prepare(event.specs)
            elif isinstance(event, Reset):
                self._bindings.clear()
                self._neighbours.clear()
            self._step(event, now)
            self._note(event)
        membership.events.clear()
        for message in membership.outbox:
            self._say(message)
        membership.outbox.clear()
        for note in membership.notes:
            log.info("%s", note)
        membership.notes.clear()
        if membership.over is not None:
            self._write_trace()
            if self._once:
                self._exit = int(membership.over.failed)
        membership.over = None

    def _note(self, event: Any) -> None:
        """Tell the trace who we are, and that a job is over."""
        welcome = self._membership.welcome
        if self._timeline is None:
            return
        if isinstance(event, Adopt) and welcome is not None:
            self._timeline.trace.number = welcome.rank
        elif isinstance(event, Reset):
            self._timeline.forget()

    def _write_trace(self) -> None:
        if self._timeline is not None:
            self._timeline.trace.write()

    def _prepare(self, specs: tuple[TensorSpec, ...]) -> None:
        """Import torch beside the loop when a half type is announced: 2-3 s of silence in the loop
        would look like a dead server."""
        if "torch" not in sys.modules and any(spec.wire in HALVES for spec in specs):
            threading.Thread(target=importlib.import_module, args=("torch",), daemon=True).start()
