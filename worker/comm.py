"""Comm: the one thread that owns every socket of a worker (DESIGN 7).

It sleeps in poll until a socket, the wake-up descriptor or a timer wants it, feeds events to the
core and to membership, and carries out their actions. Other threads hand work over by ``post`` and
never touch a socket. Whatever ends this thread settles everything that anybody waits for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import zmq

from gradsum.errors import GradsumError, ProtocolError
from gradsum.proto import data, peer
from gradsum.proto.address import Address
from gradsum.proto.control import CONTROL, Abort, Fence, FenceAck
from gradsum.proto.limits import PROTOCOL
from gradsum.proto.transport.sockets import CONTROL_LIMIT, connect_dealer, new_context
from gradsum.scheduler.credit import Bounds
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.schedule import SCHEDULES
from gradsum.worker import core as protocol
from gradsum.worker import membership as news
from gradsum.worker.connection import Connection
from gradsum.worker.core import Core
from gradsum.worker.events import SendPush
from gradsum.worker.handle import Handle, Ticket
from gradsum.worker.lookout import Lookout
from gradsum.worker.membership import Membership
from gradsum.worker.passage import Passage
from gradsum.worker.rounds import Op
from gradsum.worker.servers import Servers

if TYPE_CHECKING:
    from gradsum.worker.session import Session

TURN: Final = 0.05
"""Seconds of sending after which what has arrived has its turn."""

LOOK: Final = 0.5
QUIET_START: Final = 1.5
"""Seconds in which members that come up together are not worth a warning."""

LINGER: Final = 1_000

Condition = Callable[[Core], bool]

log = logging.getLogger("gradsum.worker")


class Comm(threading.Thread):
    """Runs until ``stop``; daemon, so a script that forgets shutdown still ends."""

    def __init__(self, session: Session, membership: Membership, address: Address) -> None:
        super().__init__(name="gradsum-comm", daemon=True)
        self.core: Core | None = None
        self._session = session
        self._settings = session.settings
        self._membership = membership
        self._address = address
        self._inbox: deque[Callable[[float], None]] = deque()
        self._handles: set[Handle] = set()
        self._wake_lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sleeping = False
        self._stopping = False
        self._context = new_context()
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._coordinator: Any = None
        self._memory = session.memory
        self._timeline = session.timeline
        self._servers = Servers(self._context, self._poller, self._settings, self._memory)
        self._watches: list[tuple[Condition, Ticket]] = []
        self._passage = Passage()
        self._lookout = Lookout(
            self._settings.stall_warning, min(self._settings.lease, self._settings.connect_timeout)
        )
        self._outgoing: deque[SendPush] = deque()
        self._started_at = time.monotonic()
        self._next_look = 0.0

    # -- for other threads --------------------------------------------------------------------

    def post(self, work: Callable[[float], None]) -> None:
        """Have ``work(now)`` run on this thread soon."""
        self._inbox.append(work)
        if self._sleeping:
            self._sleeping = False  # one call is enough, for whatever comes until it is awake
            with self._wake_lock:
                if self._wake >= 0:
                    os.eventfd_write(self._wake, 1)

    def submit(self, op: Op) -> None:
        """Hand an operation to the core; its handle is settled whatever happens to this thread."""
        self._handles.add(op.handle)
        self.post(lambda now: self._submit(op, now))

    def transports(self) -> dict[int, str]:
        """How payloads travel, by server."""
        return self._servers.transports()

    def settle(self, error: GradsumError) -> None:
        """End every wait for a tensor."""
        for handle in list(self._handles):
            self._finish(handle, error)

    def _finish(self, handle: Handle, error: GradsumError | None = None) -> None:
        self._handles.discard(handle)
        handle.finish(error)

    def _submit(self, op: Op, now: float) -> None:
        error = self._session.refused(op.name)
        if error is None:
            self.feed(protocol.Submit(op), now)
        else:
            self._finish(op.handle, error)

    def watch(self, condition: Condition, ticket: Ticket) -> None:
        """Resolve the ticket once ``condition(core)`` holds."""
        self.post(lambda now: self._watches.append((condition, ticket)))

    def stop(self) -> None:
        """End the thread after what is queued."""
        self.post(self._halt)

    def _halt(self, now: float) -> None:
        self._stopping = True

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Thread body."""
        try:
            self._coordinator = connect_dealer(
                self._context, self._address, max_message=CONTROL_LIMIT,
                heartbeat=self._settings.suspect,
            )  # fmt: skip
            self._poller.register(self._coordinator, zmq.POLLIN)
            self._membership.start(time.monotonic())
            while not self._stopping:
                self._turn()
        except GradsumError as error:
            self._session.fail(error)
            self._membership.outbox.append(Abort(error.message))
        except Exception as error:  # whatever it is, nobody may wait for ever
            log.exception("the comm thread ended")
            failure = ProtocolError(f"gradsum's comm thread ended: {error!r}")
            self._session.fail(failure)
            self._membership.outbox.append(Abort(failure.message))
        finally:
            self._close()

    def _turn(self) -> None:
        now = time.monotonic()
        self._flush(now)
        self._sleeping = True  # before the look into the inbox, so that no work is overlooked
        busy = self._inbox or self._outgoing
        events = dict(self._poller.poll(0 if busy else self._patience(now)))
        self._sleeping = False
        now = time.monotonic()
        if self._wake in events:
            os.eventfd_read(self._wake)
        while self._inbox:
            self._inbox.popleft()(now)
        if self._coordinator in events:
            self._hear_coordinator(now)
        for connection in self._servers:
            if connection.control in events:
                self._hear(connection, now)
            if connection.data in events:
                self._receive(connection, now)
        self._send_pushes(now)
        self._tick(now)
        self._check_watches()

    def _send_pushes(self, now: float) -> None:
        """Pushes leave for a while; copying them into shared memory takes time, and a sum that is
        there meanwhile lets the others go on."""
        while self._outgoing:
            push = self._outgoing.popleft()
            if self._timeline is not None:
                self._timeline.leaves(push, self._run())
            self._servers.send(push)
            if time.monotonic() - now > TURN:
                return

    def _run(self) -> str:
        """The coordinator that the plan is of: it tells one run from another."""
        plan = None if self.core is None else self.core.plan
        return "" if plan is None else plan.message.coordinator

    def _check_watches(self) -> None:
        core = self.core
        for watch in list(self._watches):
            condition, ticket = watch
            if ticket.done() or (core is not None and condition(core)):
                ticket.resolve(None)
                self._watches.remove(watch)

    def _patience(self, now: float) -> int:
        due = self._membership.next_deadline()
        if self.core is not None:
            due = min(due, self.core.next_deadline(), self._passage.due, self._next_look)
        return max(0, min(int((due - now) * 1000) + 1, 1_000))

    def _tick(self, now: float) -> None:
        core = self.core
        if core is not None and now >= core.next_deadline():
            self.feed(protocol.Tick(), now)
        if now >= self._membership.next_deadline():
            table, digest = (0, b"") if core is None else (len(core.table), core.table.digest)
            self._membership.tick(
                now, self._session.step, table, digest, self._session.idle_for(now),
                self._session.info(),
            )  # fmt: skip
            self._take_news(now)
        if core is not None and (self._passage.begun or self._session.at_fence()):
            self._at_fence(core, now)
        if core is not None and now >= self._next_look:
            self._next_look = now + LOOK
            self._look(core, now)

    def _flush(self, now: float) -> None:
        for message in self._membership.outbox:
            self._coordinator.send(CONTROL.encode(message))
        self._membership.outbox.clear()
        core = self.core
        if core is None or core.plan is None:
            return
        for server, records in core.drain(now).items():
            envelope = peer.Envelope(
                PROTOCOL, core.plan.job, core.plan.epoch, core.rank, core.incarnation,
                self._servers.incarnation(server), self._servers.generation(server),
                tuple(records),
            )  # fmt: skip
            self._servers.tell(server, envelope)

    # -- servers ------------------------------------------------------------------------------

    def _hear(self, connection: Connection, now: float) -> None:
        while (envelope := connection.hear()) is not None:
            if self._timeline is not None:
                self._timeline.heard(envelope.records)
            self.feed(
                protocol.Records(
                    connection.info.number, envelope.epoch, envelope.server_incarnation,
                    envelope.records,
                ), now,
            )  # fmt: skip

    def _receive(self, connection: Connection, now: float) -> None:
        server = connection.info.number
        for received in self._servers.receive(connection):
            if received is None:
                self._reconnect(server, now, remote=True)
            else:
                self._take_sum(protocol.SumFrame(server, *received), now)

    def _take_sum(self, event: protocol.SumFrame, now: float) -> None:
        if self._timeline is None or self.core is None:
            self.feed(event, now)
        else:
            self._timeline.takes(event, self.core, self._run(), lambda sum_: self.feed(sum_, now))

    def feed(self, event: Any, now: float) -> None:
        """Give the core an event and carry out its actions."""
        if self.core is None:
            raise ProtocolError("no plan yet")
        for action in self.core.step(event, now):
            self._carry_out(action, now)

    def _carry_out(self, action: protocol.Action, now: float) -> None:
        match action:
            case protocol.SendPush():
                self._outgoing.append(action)
            case protocol.Deliver():
                action.sink.write(
                    action.offset, action.payload, action.members, action.exponent
                )
            case protocol.Complete():
                self._finish(action.op.handle)
            case protocol.Fail():
                self._finish(action.op.handle, action.error)
            case protocol.SendAttach():
                self._attach(action.server)
            case protocol.Reconnect():
                self._reconnect(action.server, now, remote=action.remote)
            case protocol.Linked():
                self._servers.linked(action.server, action.local)
            case protocol.FetchPlan():
                self._membership.fetch(action.start, now)

    def _attach(self, server: int) -> None:
        core, welcome = self.core, self._membership.welcome
        if core is None or core.plan is None or welcome is None:
            return
        header = data.attach(
            core.plan.job, core.plan.epoch, core.rank, core.incarnation,
            self._servers.generation(server), welcome.token,
        )  # fmt: skip
        self._servers.attach(server, header)

    def _reconnect(self, server: int, now: float, *, remote: bool = False) -> None:
        generation, local = self._servers.renew(server, remote=remote)
        self._outgoing = deque(push for push in self._outgoing if push.server != server)
        self.feed(protocol.Connected(server, generation, local), now)

    # -- the coordinator ----------------------------------------------------------------------

    def _hear_coordinator(self, now: float) -> None:
        while True:
            try:
                raw = self._coordinator.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            table = 0 if self.core is None else len(self.core.table)
            self._membership.received(
                CONTROL.decode(raw), table, self._session.fence_number(), now
            )
            self._take_news(now)

    def _take_news(self, now: float) -> None:
        pending, self._membership.news = self._membership.news, []
        for item in pending:
            match item:
                case news.PlanNews():
                    self._adopt(item, now)
                case news.TableNews():
                    self._core()
                    self.feed(protocol.Extend(item.start, item.specs), now)
                case news.FenceNews():
                    self._hear_fence(item.fence, now)
                case news.TargetNews():
                    self._passage.target = item.consume
                case news.LeftNews():
                    self._core()
                    self.feed(protocol.Departed(item.ranks), now)
                case news.FailureNews() if item.tensor:
                    self._session.refuse(item.tensor, item.error)
                    self._core()
                    self.feed(protocol.FailTensor(item.tensor, item.error), now)
                case news.FailureNews():
                    self._session.fail(item.error)
                case news.FiringsNews():
                    self._session.firings_known(item.group, item.counts)
                case news.WaitingNews():
                    self._session.hear(item.text)
                    early = now - self._started_at < QUIET_START
                    log.log(logging.INFO if early else logging.WARNING, "%s", item.text)

    def _hear_fence(self, fence: Fence, now: float) -> None:
        """Answer; a later fence replaces the one that this rank rests at, and releases it (E1)."""
        known = self._session.fence_number()
        ok = self._session.announce(fence)
        self._membership.outbox.append(FenceAck(fence.number, ok, self._session.step))
        if fence.number > known and self.core is not None:
            self._passage.reset()
            self.feed(protocol.Resume(), now)

    def _core(self) -> Core:
        if self.core is None:
            welcome = self._membership.welcome
            if welcome is None:
                raise ProtocolError("the coordinator sent a plan without a welcome")
            home, probe = self._memory.offer()
            self.core = Core(
                welcome.rank, welcome.incarnation, welcome.token,
                bounds=Bounds(self._settings.credit_bytes), heartbeat=self._settings.heartbeat,
                home=home, probe=probe, allocate=self._memory.allocate,
                schedule=SCHEDULES[self._settings.schedule],
            )  # fmt: skip
        return self.core

    def _adopt(self, item: news.PlanNews, now: float) -> None:
        core = self._core()
        known = core.plan
        if known is None or item.message.epoch > known.epoch:
            self._outgoing.clear()  # what is open is pushed again under the new plan
        self.feed(protocol.Adopt(Plan.of(item.message)), now)
        if known is None or item.message.epoch > known.epoch:
            for server in self._servers.missing(item.message.servers):
                self._reconnect(server, now)
            self._session.ready(item.message)
        if item.fence and item.fence >= self._session.fence_number():
            self._passage.reset()
            if core.plan is not None and core.plan.epoch >= item.message.epoch:
                self.feed(protocol.Resume(), now)  # else the plan still waits for the table
            self._session.pass_fence(item.fence)

    def _at_fence(self, core: Core, now: float) -> None:
        number, passage = self._session.at_fence(), self._passage
        if not number:
            passage.reset()
            return
        if not passage.begun:
            self.feed(protocol.Pause(), now)
        message = passage.say(number, core, now)
        if message is not None:
            self._membership.outbox.append(message)

    def _look(self, core: Core, now: float) -> None:
        if core.plan is not None and (warning := self._lookout.look(core, core.plan, now)):
            log.warning("%s", warning)
        for op in core.waiting():
            if op.handle is not None and (error := op.handle.overdue(now)):
                self._finish(op.handle, error)

    def _close(self) -> None:
        if self._coordinator is not None:
            try:
                self._flush(time.monotonic())
            except (zmq.ZMQError, KeyError):
                log.debug("the last messages could not be sent")
            self._coordinator.close(0 if self._membership.unreachable else LINGER)
        self._servers.close()
        self._memory.close()
        self._context.term()
        with self._wake_lock:  # from here on the number may be another file's
            wake, self._wake = self._wake, -1
        os.close(wake)
