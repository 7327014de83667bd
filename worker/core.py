"""Core: the protocol of one worker, without sockets, clock, threads or torch (I5, V2, S4-S5, F).

``step(event, now) -> actions``. Operations go in, pushes and results come out. Every slice in
flight has exactly one timer: until the receipt it repeats the push, until the sum it repeats a
header-only PULL, and after that the acknowledgement is repeated until the round is stable. Hence
any message may be lost. A sum is taken only from the owner and epoch of the plan and for the version
awaited (I5).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from gradsum.errors import GradsumError, PeerLost, ProtocolError
from gradsum.proto import data, peer
from gradsum.proto.data import Header
from gradsum.proto.dtypes import CODES
from gradsum.proto.limits import PROTOCOL
from gradsum.scheduler.credit import FRAME_COST
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.policy import SUM
from gradsum.scheduler.queue import Departure, TransferQueue
from gradsum.scheduler.slicing import Layout
from gradsum.scheduler.table import Table, TensorSpec
from gradsum.worker.links import Links
from gradsum.worker.rounds import (
    RTO_CEILING,
    RTO_FLOOR,
    Flight,
    Op,
    Phase,
    Sink,
    Stream,
    UnitRound,
)

PULL_FIRST: Final = 0.25
"""Seconds from the receipt until the first PULL; doubles to RTO_CEILING (S5)."""

ACK_FIRST: Final = 0.1
"""Seconds that an acknowledgement waits for the next push to make it unnecessary (S4)."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Event: the training thread hands over a tensor."""

    op: Op


@dataclass(frozen=True, slots=True)
class SumFrame:
    """Event: a data frame from the server at ``server`` in the plan."""

    server: int
    header: Header
    payload: memoryview | None


@dataclass(frozen=True, slots=True)
class Records:
    """Event: control records from a server."""

    server: int
    epoch: int
    incarnation: int
    records: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Connected:
    """Event: sockets to a server exist, as connection ``generation``."""

    server: int
    generation: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Event: a plan is in force here."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Extend:
    """Event: table entries from ``start`` on."""

    start: int
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Departed:
    """Event: ranks that have left the job; rounds that miss them will never complete."""

    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class FailTensor:
    """Event: operations on this tensor fail (its registration was refused)."""

    name: str
    error: GradsumError


@dataclass(frozen=True, slots=True)
class Pause:
    """Event: start no new round until the next Adopt or Resume (at a fence)."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Event: the fence was aborted."""


@dataclass(frozen=True, slots=True)
class Join:
    """Event: ABSENT from here on (E7); legal when nothing is in flight."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Event: acknowledge everything now; this rank is about to leave (E6)."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: a deadline may have passed."""


@dataclass(frozen=True, slots=True)
class SendPush:
    """Action: a PUSH or ABSENT leaves; payload None is header-only."""

    server: int
    header: Header
    payload: memoryview | None


@dataclass(frozen=True, slots=True)
class SendAttach:
    """Action: bind the data connection of this generation."""

    server: int
    generation: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Action: write a piece of a sum; before the Complete of its op."""

    sink: Sink
    offset: int
    payload: memoryview
    members: int
    exponent: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Action: the op is done; its outcome is in the op."""

    op: Op


@dataclass(frozen=True, slots=True)
class Fail:
    """Action: the op will not be done."""

    op: Op
    error: GradsumError


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Action: close the sockets of a server and open new ones (F6)."""

    server: int


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Action: ask the coordinator for its plan and the table from ``start`` on."""

    start: int


Action = SendPush | SendAttach | Deliver | Complete | Fail | Reconnect | FetchPlan


class Core:
    """Everything that is on its way between this rank and the servers."""

    def __init__(
        self, rank: int, incarnation: int, token: bytes, *, window: int, heartbeat: float
    ) -> None:
        """window: bytes that each server may have on its way to us; heartbeat: seconds."""
        self.rank = rank
        self.incarnation = incarnation
        self.table = Table()
        self.plan: Plan | None = None
        self._coming: Adopt | None = None
        self.counters = {"pushed": 0, "pulled": 0, "pushes": 0, "resends": 0, "pulls": 0,
                         "ignored": 0}  # fmt: skip
        self.links = Links(token, window, heartbeat)
        self._layout: Layout | None = None
        self._queue: TransferQueue[Flight] = TransferQueue(self._waits)
        self._streams: dict[int, Stream] = {}
        self._ops: dict[int, dict[int, Op]] = {}
        self._timers: list[tuple[float, int, Flight | Stream]] = []
        self._count = 0
        self._left: frozenset[int] = frozenset()
        self._paused = False
        self._actions: list[Action] = []

    # -- the face -----------------------------------------------------------------------------

    def step(self, event: Any, now: float) -> list[Action]:
        """Take one event; the actions are to be carried out in order."""
        self._HANDLERS[type(event)](self, event, now)
        if not isinstance(event, Tick):
            self._depart(now)
        actions, self._actions = self._actions, []
        return actions

    def drain(self, now: float) -> dict[int, list[Any]]:
        """Control records per server that are to be sent now."""
        return self.links.drain(now)

    def next_deadline(self) -> float:
        """When Tick and drain are due."""
        while self._timers and not self._valid(self._timers[0]):
            heapq.heappop(self._timers)
        timer = self._timers[0][0] if self._timers else float("inf")
        return min(timer, self.links.next_deadline())

    def idle(self) -> bool:
        """Whether no round is open and nothing submitted waits for one (a fence may pause)."""
        if self._paused:
            return all(stream.round is None for stream in self._streams.values())
        return not self._ops and all(s.round is None for s in self._streams.values())

    def settled(self) -> bool:
        """Whether nobody depends on this rank any more: idle, and all that was read is stable."""
        return self.idle() and all(s.last is None for s in self._streams.values())

    def versions(self) -> dict[int, int]:
        """The last finished version of every tensor that this rank has used (V3)."""
        return {
            member.key: stream.base
            for stream in self._streams.values()
            for member in stream.unit.members
        }

    def waiting(self) -> list[Op]:
        """Operations that are not complete, oldest first."""
        return sorted((op for ops in self._ops.values() for op in ops.values()),
                      key=lambda op: op.since)  # fmt: skip

    # -- plan and table -----------------------------------------------------------------------

    def _adopt(self, event: Adopt, now: float) -> None:
        """Clocks start at the fence's versions; what is open is pushed again under the new plan."""
        if self.plan is not None and event.plan.epoch <= self.plan.epoch:
            self._paused = self._coming is not None
            return self._open_all(now)
        if event.plan.message.packed > len(self.table):  # its packing names keys not known here
            self._coming = event
            self._actions.append(FetchPlan(len(self.table)))
            return
        self._paused = False
        self.plan = event.plan
        self._layout = event.plan.layout(self.table)
        self._streams.clear()
        self._timers.clear()
        self.links.adopt(event.plan, now)
        for server in range(len(event.plan.servers)):
            self._queue.expect(server)
        self._queue.clear()
        self._open_all(now)

    def _extend(self, event: Extend, now: float) -> None:
        if event.start > len(self.table):
            self._actions.append(FetchPlan(len(self.table)))
            return
        self.table.extend(event.start, event.specs)
        if self._layout is not None:
            self._layout.extend()
        coming, self._coming = self._coming, None
        if coming is not None:
            self._adopt(coming, now)
        self._open_all(now)

    def _pause(self, event: Pause, now: float) -> None:
        self._paused = True

    def _resume(self, event: Resume, now: float) -> None:
        self._paused = False
        self._open_all(now)

    def _open_all(self, now: float) -> None:
        for key in list(self._ops):
            self._open(key, now)

    # -- rounds -------------------------------------------------------------------------------

    def _submit(self, event: Submit, now: float) -> None:
        op = event.op
        op.since = now
        self._ops.setdefault(op.key, {})[op.version] = op
        stream = self._stream(op.key)
        if stream is not None and stream.round is not None and stream.round.error is not None:
            self._fail(op, stream.round.error(op))
            return
        self._open(op.key, now)

    def _stream(self, key: int) -> Stream | None:
        if self.plan is None or self._layout is None:
            return None
        unit = self._layout.unit_of.get(key)
        if unit is None:
            return None
        stream = self._streams.get(unit.key)
        if stream is None:
            stream = Stream(unit, self.plan.base(unit.key, self.table))
            self._streams[unit.key] = stream
        return stream

    def _open(self, key: int, now: float) -> None:
        """Start the next version of the key's unit when all its tensors are handed over (E8)."""
        stream = self._stream(key)
        if stream is None or stream.round is not None or self._paused:
            return
        version = stream.base + 1
        ops = [self._ops.get(member.key, {}).get(version) for member in stream.unit.members]
        if any(op is None for op in ops):
            return
        policy = stream.unit.policy
        writes = policy.writes(self.rank)
        if policy.kind != SUM and writes and stream.last is not None:
            return  # a broadcast's next round starts when the last one is stable
        round_ = UnitRound(stream, version, tuple(op for op in ops if op is not None), writes)
        stream.round = round_
        if writes:
            round_.pack()
        for flight in round_.flights:
            if writes:
                self._enqueue(flight)
            else:
                flight.phase = Phase.AWAIT
                self._arm(flight, now, PULL_FIRST)

    def _enqueue(self, flight: Flight) -> None:
        flight.phase = Phase.QUEUED
        flight.due = float("inf")
        self._queue.push(
            flight.slice.server, flight.round.priority, self._cost(flight), flight
        )

    @staticmethod
    def _cost(flight: Flight) -> int:
        return FRAME_COST + (flight.slice.length if flight.round.source is not None else 0)

    def _arm(self, target: Flight | Stream, now: float, after: float) -> None:
        self._count += 1
        if isinstance(target, Flight):
            target.rto = after
            target.due = now + after
            heapq.heappush(self._timers, (target.due, self._count, target))
        else:
            target.ack_rto = after
            target.ack_due = now + after
            heapq.heappush(self._timers, (target.ack_due, self._count, target))

    @staticmethod
    def _valid(timer: tuple[float, int, Flight | Stream]) -> bool:
        due, _, target = timer
        return due == (target.due if isinstance(target, Flight) else target.ack_due)

    # -- pushing ------------------------------------------------------------------------------

    def _depart(self, now: float) -> None:
        while (departure := self._queue.pop()) is not None:
            self._send(departure, now)

    def _waits(self, server: int, flight: Flight) -> bool:
        """Whether a queued flight is still to be sent: its sum may have come, or a new plan."""
        return flight.phase is Phase.QUEUED and self._current(flight)

    def _current(self, flight: Flight) -> bool:
        return flight.round.stream.round is flight.round

    def _send(self, departure: Departure[Flight], now: float) -> None:
        flight, plan = departure.item, self.plan
        if plan is None:
            return
        round_, slice_ = flight.round, flight.slice
        payload = None
        if round_.source is not None:
            payload = round_.source[slice_.offset : slice_.offset + slice_.length]
        length = 0 if payload is None else slice_.length
        unit = round_.stream.unit
        header = Header(
            data.ABSENT if payload is None else data.PUSH, PROTOCOL, plan.job, plan.epoch, unit.key,
            slice_.number, round_.version, self.rank, self.incarnation,
            plan.servers[slice_.server].incarnation, departure.generation, departure.offset,
            departure.seq, round_.priority, CODES[unit.wire], 0, length, len(plan.members),
            int(payload is not None), round_.mask, 0,
        )  # fmt: skip
        flight.phase = Phase.SENT
        flight.sent = now
        flight.seq = departure.seq
        self.links.sent(slice_.server, departure.seq, flight)
        self._arm(flight, now, max(self.links.timeout(slice_.server), flight.rto))
        self.counters["pushes"] += 1
        self.counters["pushed"] += length
        self._actions.append(SendPush(slice_.server, header, payload))

    # -- timers -------------------------------------------------------------------------------

    def _tick(self, event: Tick, now: float) -> None:
        forced: set[int] = set()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)
            if not self._valid(timer):
                continue
            if isinstance(timer[2], Stream):
                self._acknowledge(timer[2], now)
            else:
                self._expired(timer[2], forced, now)
        for server in self.links.stale(now):
            self._actions.append(SendAttach(server, self.links.generation(server)))
        for departure in self._queue.overdue(now):
            self._send(departure, now)
        self._depart(now)

    def _expired(self, flight: Flight, forced: set[int], now: float) -> None:
        server = flight.slice.server
        if not self._current(flight):
            return
        if flight.phase in (Phase.SENT, Phase.LATER):
            self.links.settle(server, flight.seq)
            flight.rto = min(flight.rto * 2, RTO_CEILING)
            self._push_again(flight, forced, now)
        elif flight.phase is Phase.AWAIT:
            self.counters["pulls"] += 1
            self.links.tell(server, peer.Pull(*self._name(flight)))
            self._arm(flight, now, min(flight.rto * 2, RTO_CEILING))
        elif flight.phase is Phase.ACKING:
            self.links.tell(server, peer.Ack(*self._name(flight)))
            self._arm(flight, now, min(flight.rto * 2, RTO_CEILING))

    def _push_again(self, flight: Flight, forced: set[int], now: float) -> None:
        """A timer may send one frame per connection beyond the grant; others queue (F3)."""
        self.counters["resends"] += 1
        flight.resent = True
        server = flight.slice.server
        if server in forced:
            self._enqueue(flight)
            return
        forced.add(server)
        departure = self._queue.force(server, flight.round.priority, self._cost(flight), flight)
        self._send(departure, now)

    @staticmethod
    def _name(flight: Flight) -> tuple[int, int, int]:
        return flight.round.stream.unit.key, flight.slice.number, flight.round.version

    # -- sums ---------------------------------------------------------------------------------

    def _sum(self, event: SumFrame, now: float) -> None:
        header = event.header
        if not self.links.arrived(event.server, header.generation, header.offset, now):
            self.counters["ignored"] += 1
            return
        flight = self._awaited(event.server, header)
        if flight is None:
            self.counters["ignored"] += 1
            return
        held = 0 if event.payload is None else event.payload.nbytes
        if held != header.length or (header.present and held != flight.slice.length):
            raise ProtocolError(f"server {event.server} sent {header} with {held} bytes")
        round_ = flight.round
        self.links.settle(event.server, flight.seq)
        self._scatter(flight, header, event.payload)
        self.counters["pulled"] += held
        round_.payloads.append(event.payload)
        flight.phase = Phase.DONE
        flight.due = float("inf")
        round_.left -= 1
        if round_.left == 0:
            self._finish(round_, now)

    def _awaited(self, server: int, header: Header) -> Flight | None:
        """The flight that a sum is for, if it comes from the owner in this epoch (I5)."""
        plan = self.plan
        if (
            plan is None
            or header.kind != data.SUM
            or header.epoch != plan.epoch
            or header.server_incarnation != plan.servers[server].incarnation
        ):
            return None
        return self._flight(server, header.key, header.slice, header.version)

    def _flight(self, server: int, key: int, index: int, version: int) -> Flight | None:
        stream = self._streams.get(key)
        round_ = None if stream is None else stream.round
        if round_ is None or round_.version != version or index >= len(round_.flights):
            return None
        flight = round_.flights[index]
        if flight.slice.server != server or flight.phase is Phase.DONE:
            return None
        return flight

    def _scatter(self, flight: Flight, header: Header, payload: memoryview | None) -> None:
        """Hand the pieces of a slice to the tensors they belong to."""
        round_, slice_ = flight.round, flight.slice
        unit = round_.stream.unit
        for index, (member, op) in enumerate(zip(unit.members, round_.ops, strict=True)):
            start = max(member.offset, slice_.offset)
            stop = min(member.offset + member.length, slice_.offset + slice_.length)
            if unit.packed and start >= stop:
                continue
            op.members = header.members
            if unit.packed:
                there = index < 8 * len(header.mask) and header.mask[index // 8] >> index % 8 & 1
            else:
                there = header.present > 0
            if not there or payload is None:
                continue
            op.present = True
            if op.sink is not None:
                piece = payload[start - slice_.offset : stop - slice_.offset]
                self._actions.append(
                    Deliver(op.sink, start - member.offset, piece, header.members, header.exponent)
                )

    def _finish(self, round_: UnitRound, now: float) -> None:
        stream = round_.stream
        if stream.last is not None:
            stream.last.release()
        stream.base, stream.round, stream.last = round_.version, None, round_
        for op in round_.ops:
            self._complete(op)
        eager = stream.unit.policy.kind != SUM
        self._arm(stream, now, 0.0 if eager else ACK_FIRST)
        if eager:
            self._acknowledge(stream, now)
        for member in stream.unit.members:
            self._open(member.key, now)

    def _complete(self, op: Op) -> None:
        ops = self._ops.get(op.key)
        if ops is not None and ops.get(op.version) is op:
            del ops[op.version]
            if not ops:
                del self._ops[op.key]
            self._actions.append(Complete(op))

    def _acknowledge(self, stream: Stream, now: float) -> None:
        """Say that sum(v) is consumed, unless a push of v + 1 says it already (S4)."""
        last = stream.last
        stream.ack_due = float("inf")
        if last is None or (stream.round is not None and stream.round.writes):
            return
        for flight in last.flights:
            if not flight.stable:
                self.links.tell(flight.slice.server, peer.Ack(*self._name(flight)))
        self._arm(stream, now, min(max(stream.ack_rto * 2, RTO_FLOOR), RTO_CEILING))

    # -- records ------------------------------------------------------------------------------

    def _records(self, event: Records, now: float) -> None:
        server = event.server
        self.links.heard(server, now)
        for record in event.records:
            match record:
                case peer.Attached():
                    self.links.attached(server, record.generation)
                case peer.Stranger():
                    if self.links.strange(server):
                        self._actions.append(Reconnect(server))
                case peer.Credit():
                    self._queue.grant(server, *record)
                case peer.StandingSeen():
                    self.links.standing_seen(server)
                case peer.Ping():
                    pass
                case peer.Stable():
                    self._stable(server, record, now)
                case _:
                    self._about_slice(event, record, now)

    def _about_slice(self, event: Records, record: Any, now: float) -> None:
        """Receipt, Open, Nack, Queued, Later, Resend: only from the owner in this epoch (I5)."""
        if isinstance(record, peer.Nack) and record.reason == "epoch":
            if self.plan is not None and record.epoch > self.plan.epoch:
                self._actions.append(FetchPlan(len(self.table)))
            return
        if self.plan is None or event.epoch != self.plan.epoch:
            self.counters["ignored"] += 1
            return
        flight = self._flight(event.server, record.key, record.slice, record.version)
        if flight is None:
            return
        match record:
            case peer.Receipt():
                self._receipt(flight, record.seq, now)
            case peer.Open():
                self._still_open(flight, record.missing, now)
            case peer.Later():
                if flight.phase is Phase.SENT:
                    self.links.settle(event.server, flight.seq)
                    flight.phase = Phase.LATER
                    self._arm(flight, now, RTO_CEILING)
            case peer.Resend():
                if flight.phase in (Phase.LATER, Phase.SENT):
                    self.links.settle(event.server, flight.seq)
                    self._enqueue(flight)
            case peer.Nack():
                self._refused(flight, record)

    def _receipt(self, flight: Flight, seq: int, now: float) -> None:
        server = flight.slice.server
        if flight.phase not in (Phase.SENT, Phase.QUEUED, Phase.LATER):
            return
        if not flight.resent:
            self.links.measured(server, now - flight.sent)
        self.links.settle(server, flight.seq)
        for lost in self.links.overtaken(server, seq):
            if lost.phase is Phase.SENT and self._current(lost):
                lost.due = max(now, lost.sent + RTO_FLOOR)
                self._count += 1
                heapq.heappush(self._timers, (lost.due, self._count, lost))
        if flight.round.stream.unit.policy.reads(self.rank):
            flight.phase = Phase.AWAIT
            self._arm(flight, now, PULL_FIRST)
        else:
            flight.phase = Phase.ACKING
            self._arm(flight, now, ACK_FIRST)
            self._written(flight.round)

    def _written(self, round_: UnitRound) -> None:
        """The root of a broadcast is done for its caller when the servers have everything."""
        if all(f.phase in (Phase.ACKING, Phase.DONE) for f in round_.flights):
            for op in round_.ops:
                op.present, op.members = True, 1
                self._complete(op)

    def _still_open(self, flight: Flight, missing: tuple[int, ...], now: float) -> None:
        for op in flight.round.ops:
            op.missing = missing
        gone = self._left.intersection(missing)
        if gone:
            self._fail_round(flight.round, lambda op: gone_error(op, gone))
        elif flight.phase is Phase.AWAIT and flight.round.writes and (
            not missing or self.rank in missing
        ):
            self._enqueue(flight)

    def _refused(self, flight: Flight, record: peer.Nack) -> None:
        why = "a version was skipped" if record.reason == "gap" else record.reason
        self._fail_round(
            flight.round,
            lambda op: ProtocolError(
                f"server {flight.slice.server} refused tensor {op.name!r} version "
                f"{record.version}: {why}",
                tensor=op.name, peer=f"server {flight.slice.server}",
            ),
        )  # fmt: skip

    def _stable(self, server: int, record: peer.Stable, now: float) -> None:
        stream = self._streams.get(record.key)
        if stream is None:
            return
        for round_ in (stream.last, stream.round):
            if (
                round_ is None
                or round_.version != record.version
                or record.slice >= len(round_.flights)
            ):
                continue
            flight = round_.flights[record.slice]
            flight.stable = True
            if flight.phase in (Phase.ACKING, Phase.SENT, Phase.QUEUED) and round_ is stream.round:
                self._root_stable(flight, now)
            elif round_ is stream.last and all(f.stable for f in round_.flights):
                round_.release()
                stream.last = None
                stream.ack_due = float("inf")

    def _root_stable(self, flight: Flight, now: float) -> None:
        """Everybody has this slice of a broadcast that we wrote."""
        round_, stream = flight.round, flight.round.stream
        if stream.unit.policy.reads(self.rank):
            return
        flight.phase = Phase.DONE
        flight.due = float("inf")
        round_.left -= 1
        self._written(round_)
        if round_.left == 0:
            stream.base, stream.round = round_.version, None
            for member in stream.unit.members:
                self._open(member.key, now)

    # -- ends ---------------------------------------------------------------------------------

    def _departed(self, event: Departed, now: float) -> None:
        """Ask about every open round at once: those that miss a rank that left will fail."""
        self._left = event.ranks
        for stream in self._streams.values():
            for flight in stream.round.flights if stream.round else ():
                if flight.phase is Phase.AWAIT:
                    self._arm(flight, now, RTO_FLOOR)

    def _fail_tensor(self, event: FailTensor, now: float) -> None:
        for ops in list(self._ops.values()):
            for op in list(ops.values()):
                if op.name == event.name:
                    self._fail(op, event.error)

    def _fail_round(self, round_: UnitRound, error: Callable[[Op], GradsumError]) -> None:
        """The round stays open towards the servers, but nobody here waits for it any more."""
        round_.error = error
        for op in round_.ops:
            self._fail(op, error(op))

    def _fail(self, op: Op, error: GradsumError) -> None:
        ops = self._ops.get(op.key)
        if ops is not None and ops.get(op.version) is op:
            del ops[op.version]
            if not ops:
                del self._ops[op.key]
            self._actions.append(Fail(op, error))

    def _connected(self, event: Connected, now: float) -> None:
        """A new connection: what was in flight on the old one is lost (F1)."""
        for flight in self.links.connected(event.server, event.generation, now):
            if flight.phase is Phase.SENT and self._current(flight):
                self._enqueue_later(flight)
        self._queue.open(event.server, event.generation, 0)
        self._actions.append(SendAttach(event.server, event.generation))
        for stream in self._streams.values():
            for flight in stream.round.flights if stream.round else ():
                if flight.phase is Phase.AWAIT and flight.slice.server == event.server:
                    self._arm(flight, now, RTO_FLOOR)

    def _enqueue_later(self, flight: Flight) -> None:
        flight.resent = True
        self._enqueue(flight)

    def _join(self, event: Join, now: float) -> None:
        self.links.join()

    def _settle(self, event: Settle, now: float) -> None:
        for stream in self._streams.values():
            if stream.last is not None:
                stream.ack_rto = RTO_FLOOR
                self._acknowledge(stream, now)

    _HANDLERS: Final[dict[type, Callable[[Core, Any, float], None]]] = {
        Submit: _submit,
        SumFrame: _sum,
        Records: _records,
        Connected: _connected,
        Adopt: _adopt,
        Extend: _extend,
        Departed: _departed,
        FailTensor: _fail_tensor,
        Pause: _pause,
        Resume: _resume,
        Join: _join,
        Settle: _settle,
        Tick: _tick,
    }


def gone_error(op: Op, ranks: Iterable[int]) -> PeerLost:
    """The error of an operation that waits for ranks that have left."""
    who = ", ".join(f"rank {rank}" for rank in sorted(ranks))
    return PeerLost(
        f"tensor {op.name!r} version {op.version}: {who} has left the job",
        peer=who, tensor=op.name,
        hint="call gradsum.join() on ranks that run out of data before the others",
    )  # fmt: skip
