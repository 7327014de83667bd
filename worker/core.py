"""Core: the protocol of one worker, without sockets, clock, threads or torch (I5, V2, S4-S5, F).

``step(event, now) -> actions``. Operations go in, pushes and results come out. This file is the
face and the receiving half: plans, sums, records. A sum is taken only from the owner and epoch of
the plan and for the version awaited (I5). The sending half and its timers are in Transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gradsum.errors import ProtocolError
from gradsum.proto import data, peer
from gradsum.proto.data import Header
from gradsum.scheduler.policy import SUM
from gradsum.worker.events import (
    Action,
    Adopt,
    Complete,
    Connected,
    Deliver,
    Departed,
    Extend,
    Fail,
    FailTensor,
    FetchPlan,
    Join,
    Linked,
    Pause,
    Reconnect,
    Records,
    Resume,
    SendAttach,
    SendPush,
    Settle,
    Submit,
    SumFrame,
    Tick,
)
from gradsum.worker.rounds import RTO_CEILING, RTO_FLOOR, Flight, Op, Phase, Stream, UnitRound
from gradsum.worker.sums import gone_error, refusal_error, scatter
from gradsum.worker.transfers import PULL_FIRST, Transfers

__all__ = [
    "Action", "Adopt", "Complete", "Connected", "Core", "Deliver", "Departed", "Extend", "Fail",
    "FailTensor", "FetchPlan", "Join", "Pause", "Reconnect", "Records", "Resume", "SendAttach",
    "SendPush", "Settle", "Linked", "Submit", "SumFrame", "Tick",
]  # fmt: skip

ACK_FIRST: Final = 0.1
"""Seconds that an acknowledgement waits for the next push to make it unnecessary (S4)."""


class Core(Transfers):
    """Everything that is on its way between this rank and the servers."""

    _coming: Adopt | None = None

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
        return min(self._timers.next(), self.links.next_deadline())

    def _submit(self, event: Submit, now: float) -> None:
        op = event.op
        op.since = now
        if self._paused:
            self._held.append(op)
        else:
            self._take(op, now)

    def _take(self, op: Op, now: float) -> None:
        self._ops.setdefault(op.key, {})[op.version] = op
        stream = self._stream(op.key)
        if stream is not None and stream.round is not None and stream.round.error is not None:
            self._fail(op, stream.round.error(op))
            return
        self._open(op.key, now)

    # -- plan and table -----------------------------------------------------------------------

    def _adopt(self, event: Adopt, now: float) -> None:
        """Clocks start at the fence's versions; what is open is pushed again under the new plan."""
        if self.plan is not None and event.plan.epoch <= self.plan.epoch:
            return  # said again; an aborted fence ends by Resume
        if event.plan.message.packed > len(self.table):  # its packing names keys not known here
            self._coming = event
            self._actions.append(FetchPlan(len(self.table)))
            return
        self.plan = event.plan
        self._layout = event.plan.layout(self.table)
        self._streams.clear()
        self._timers.clear()
        self.links.adopt(event.plan, now)
        for server, info in enumerate(event.plan.servers):
            self._queue.expect(server)
            self._queue.share(server, info.weight)
        self._queue.clear()
        self._resume(Resume(), now)

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
        held, self._held = self._held, []
        for op in held:
            self._take(op, now)
        self._open_all(now)

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
        self._actions += scatter(flight, header, event.payload)
        self.counters["pulled"] += held
        round_.payloads.append(event.payload)
        flight.phase = Phase.DONE
        flight.due = float("inf")
        flight.kept = None
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

    def _finish(self, round_: UnitRound, now: float) -> None:
        stream = round_.stream
        if stream.last is not None:
            stream.last.release()
        stream.base, stream.round, stream.last = round_.version, None, round_
        for op in round_.ops:
            self._complete(op)
        round_.give_back()
        eager = stream.unit.policy.kind != SUM
        self._timers.arm(stream, now, 0.0 if eager else ACK_FIRST)
        if eager:
            self._acknowledge(stream, now)
        for member in stream.unit.members:
            self._open(member.key, now)

    def _flight(self, server: int, key: int, index: int, version: int) -> Flight | None:
        stream = self._streams.get(key)
        round_ = None if stream is None else stream.round
        if round_ is None or round_.version != version or index >= len(round_.flights):
            return None
        flight = round_.flights[index]
        if flight.slice.server != server or flight.phase is Phase.DONE:
            return None
        return flight

    # -- records ------------------------------------------------------------------------------

    def _records(self, event: Records, now: float) -> None:
        server = event.server
        self.links.heard(server, now)
        before = self._queue.arrived
        for record in event.records:
            if isinstance(record, peer.Receipt):  # also when the sum has come before it
                self._queue.received(server, record.seq)
            match record:
                case peer.Attached():
                    if self.links.attached(server, record.generation):
                        self._actions.append(Linked(server, record.local))
                case peer.Unmapped():
                    if self.links.strange(server):
                        self._actions.append(Reconnect(server, remote=True))
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
        self.uplink.arrived(self._queue.arrived - before, self._queue.under_way, now)
        if self.plan is not None:
            self._queue.bound = self._schedule.bound(
                self.uplink.bound, self.plan.message.slice_bytes
            )

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
                    self._timers.arm(flight, now, RTO_CEILING)
            case peer.Resend():
                if flight.phase in (Phase.LATER, Phase.SENT):
                    self.links.settle(event.server, flight.seq)
                    self._enqueue(flight)
            case peer.Nack():
                self._fail_round(
                    flight.round, lambda op: refusal_error(op, event.server, record)
                )

    def _receipt(self, flight: Flight, seq: int, now: float) -> None:
        server = flight.slice.server
        self.links.measured(server, seq, now)
        if flight.phase not in (Phase.SENT, Phase.QUEUED, Phase.LATER):
            return
        self.links.settle(server, flight.seq)
        for lost in self.links.overtaken(server, seq):
            if lost.phase is Phase.SENT and self._current(lost):
                self._timers.hasten(lost, max(now, lost.sent + RTO_FLOOR))
        if flight.round.stream.unit.policy.reads(self.rank):
            flight.phase = Phase.AWAIT
            self._timers.arm(flight, now, PULL_FIRST)
        else:
            flight.phase = Phase.ACKING
            self._timers.arm(flight, now, ACK_FIRST)
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
        flight.kept = None
        round_.left -= 1
        self._written(round_)
        if round_.left == 0:
            stream.base, stream.round = round_.version, None
            round_.give_back()
            for member in stream.unit.members:
                self._open(member.key, now)

    # -- ends ---------------------------------------------------------------------------------

    def _tick(self, event: Tick, now: float) -> None:
        for target in self._timers.due(now):
            if isinstance(target, Stream):
                self._acknowledge(target, now)
            else:
                self._expired(target, now)
        for server in self.links.stale(now):
            self._actions.append(SendAttach(server, self.links.generation(server)))
        for departure in self._queue.overdue(now):
            self._send(departure, now)
        self._depart(now)

    def _departed(self, event: Departed, now: float) -> None:
        """Ask about every open round at once: those that miss a rank that left will fail."""
        self._left = event.ranks
        for stream in self._streams.values():
            for flight in stream.round.flights if stream.round else ():
                if flight.phase is Phase.AWAIT:
                    self._timers.arm(flight, now, RTO_FLOOR)

    def _fail_tensor(self, event: FailTensor, now: float) -> None:
        for op in self.waiting():
            if op.name == event.name:
                self._fail(op, event.error)

    def _connected(self, event: Connected, now: float) -> None:
        """A new connection: what was in flight on the old one is lost (F1)."""
        for flight in self.links.connected(
            event.server, event.generation, event.local, now
        ):
            if flight.phase is Phase.SENT and self._current(flight):
                self._enqueue(flight)
        self._queue.open(event.server, event.generation, 0)
        self._actions.append(SendAttach(event.server, event.generation))
        for stream in self._streams.values():
            for flight in stream.round.flights if stream.round else ():
                if flight.phase is Phase.AWAIT and flight.slice.server == event.server:
                    self._timers.arm(flight, now, RTO_FLOOR)

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
