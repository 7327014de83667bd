"""Transfers: the sending half of a worker - rounds that are open, pushes, timers (V2, S4, S5, F3).

Every slice in flight has exactly one timer: until the receipt it repeats the push, until the sum a
header-only PULL, and after that the acknowledgement is repeated until the round is stable. Hence
any message may be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gradsum.errors import GradsumError
from gradsum.proto import data, peer
from gradsum.proto.data import Header
from gradsum.proto.dtypes import CODES
from gradsum.proto.limits import PROTOCOL
from gradsum.scheduler.credit import FRAME_COST, Bounds
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.policy import SUM
from gradsum.scheduler.queue import Departure, TransferQueue
from gradsum.scheduler.schedule import OURS, Schedule
from gradsum.scheduler.slicing import Layout
from gradsum.scheduler.table import Table
from gradsum.scheduler.uplink import Uplink
from gradsum.worker.events import Action, Complete, Fail, SendPush
from gradsum.worker.links import Links
from gradsum.worker.rounds import (
    RTO_CEILING,
    RTO_FLOOR,
    Allocate,
    Flight,
    Op,
    Phase,
    Stream,
    UnitRound,
    private,
)
from gradsum.worker.timers import Timers

PULL_FIRST: Final = 0.5
"""Seconds from the receipt until the first PULL; doubles to RTO_CEILING (S5)."""


class Transfers:
    """What this rank has handed over, and how far it is."""

    def __init__(
        self, rank: int, incarnation: int, token: bytes, *, bounds: Bounds, heartbeat: float,
        home: str = "", probe: bytes = b"", allocate: Allocate = private,
        schedule: Schedule = OURS,
    ) -> None:  # fmt: skip
        """bounds: what each server may have on its way to us; heartbeat: seconds;
        home, probe: what Attach says of our shared memory; allocate: memory of packed buffers."""
        self.rank = rank
        self.incarnation = incarnation
        self.table = Table()
        self.plan: Plan | None = None
        self.counters = {"pushed": 0, "pulled": 0, "pushes": 0, "resends": 0, "pulls": 0,
                         "ignored": 0}  # fmt: skip
        self.links = Links(peer.Attach(token, home, probe), bounds, heartbeat)
        self.uplink = Uplink()
        self._allocate = allocate
        self._layout: Layout | None = None
        self._schedule = schedule
        self._queue: TransferQueue[Flight] = TransferQueue(
            self._waits, urgent=schedule.urgent_pushes
        )
        self._streams: dict[int, Stream] = {}
        self._ops: dict[int, dict[int, Op]] = {}
        self._timers = Timers()
        self._left: frozenset[int] = frozenset()
        self._paused = False
        self._held: list[Op] = []  # submitted at a fence, for after it
        self._actions: list[Action] = []

    # -- questions ---------------------------------------------------------------------------

    def idle(self) -> bool:
        """Whether no round is open, nothing submitted waits for one, and no fence holds us."""
        resting = not self._ops and not self._held and not self._paused
        return resting and all(s.round is None for s in self._streams.values())

    def settled(self) -> bool:
        """Whether nobody depends on this rank any more: idle, and all that was read is stable."""
        return self.idle() and all(s.last is None for s in self._streams.values())

    def resting(self) -> bool:
        """Whether no broadcast of ours is still owed to a reader: nobody would push it again."""
        return all(
            stream.round is None
            for stream in self._streams.values()
            if stream.unit.policy.kind != SUM and stream.unit.policy.writes(self.rank)
        )

    def submitted(self) -> dict[int, int]:
        """The highest version that this rank will begin of itself, of every tensor in use (E1)."""
        found: dict[int, int] = {}
        for key in [*self._streams, *self._ops]:
            unit = None if self._layout is None else self._layout.unit_of.get(key)
            keys = (key,) if unit is None else tuple(member.key for member in unit.members)
            if key not in found:
                lowest = min(map(self._last, keys))  # a buffer waits for all of its tensors
                found.update(dict.fromkeys(keys, lowest))
        return found

    def consumed(self, target: Mapping[int, int]) -> bool:
        """Whether the sums up to these versions are in."""
        return all(self._base(key) >= version for key, version in target.items())

    def _last(self, key: int) -> int:
        unit = None if self._layout is None else self._layout.unit_of.get(key)
        stream = None if unit is None else self._streams.get(unit.key)
        begun = stream.round.version if stream is not None and stream.round is not None else 0
        return max(begun, *self._ops.get(key, ()), self._base(key))

    def _base(self, key: int) -> int:
        """The last version of a tensor whose sum is in."""
        unit = None if self._layout is None else self._layout.unit_of.get(key)
        stream = None if unit is None else self._streams.get(unit.key)
        if stream is not None:
            return stream.base
        return 0 if self.plan is None or unit is None else self.plan.base(key, self.table)

    def waiting(self) -> list[Op]:
        """Operations that are not complete, oldest first."""
        begun = [op for ops in self._ops.values() for op in ops.values()]
        return sorted([*begun, *self._held], key=lambda op: op.since)

    # -- rounds -------------------------------------------------------------------------------

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
        if stream is None or stream.round is not None:
            return
        version = stream.base + 1
        if not stream.gather(lambda member: version in self._ops.get(member, ())):
            return
        ops = [self._ops[member.key][version] for member in stream.unit.members]
        policy = stream.unit.policy
        writes = policy.writes(self.rank)
        if policy.kind != SUM and writes and stream.last is not None:
            return  # a broadcast's next round starts when the last one is stable
        round_ = UnitRound(stream, version, tuple(ops), writes)
        stream.round = round_
        if writes:
            round_.pack(self._allocate)
        for flight in round_.flights:
            if writes:
                self._enqueue(flight)
            else:
                flight.phase = Phase.AWAIT
                self._timers.arm(flight, now, PULL_FIRST)

    def _enqueue(self, flight: Flight) -> None:
        flight.phase = Phase.QUEUED
        flight.due = float("inf")
        self._queue.push(
            flight.slice.server, flight.round.priority, self._cost(flight), flight
        )

    @staticmethod
    def _cost(flight: Flight) -> int:
        return FRAME_COST + (flight.slice.length if flight.round.source is not None else 0)

    def _open_all(self, now: float) -> None:
        for key in list(self._ops):
            self._open(key, now)

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
        self.links.sent(slice_.server, departure.seq, flight, now)
        self.uplink.departed(now)
        self._timers.arm(flight, now, max(self.links.timeout(slice_.server), flight.rto))
        self.counters["pushes"] += 1
        self.counters["pushed"] += length
        self._actions.append(SendPush(slice_.server, header, payload, flight))

    # -- timers -------------------------------------------------------------------------------

    def _expired(self, flight: Flight, now: float) -> None:
        """A push goes to the queue again: it may leave within the grant, or when the lane stalls.

        On a slow link what seems lost is on its way; repeats beyond the grant would fill it (F3).
        """
        server = flight.slice.server
        if not self._current(flight):
            return
        flight.rto = min(flight.rto * 2, RTO_CEILING)
        if flight.phase in (Phase.SENT, Phase.LATER):
            self.counters["resends"] += 1
            self.links.settle(server, flight.seq)
            self._enqueue(flight)
        elif flight.phase is Phase.AWAIT:
            self.counters["pulls"] += 1
            self.links.tell(server, peer.Pull(*self._name(flight)))
            self._timers.arm(flight, now, flight.rto)
        elif flight.phase is Phase.ACKING:
            self.links.tell(server, peer.Ack(*self._name(flight)))
            self._timers.arm(flight, now, flight.rto)

    @staticmethod
    def _name(flight: Flight) -> tuple[int, int, int]:
        return flight.round.stream.unit.key, flight.slice.number, flight.round.version

    def _acknowledge(self, stream: Stream, now: float) -> None:
        """Say that sum(v) is consumed, unless a push of v + 1 says it already (S4)."""
        last = stream.last
        stream.ack_due = float("inf")
        if last is None or (stream.round is not None and stream.round.writes):
            return
        for flight in last.flights:
            if not flight.stable:
                self.links.tell(flight.slice.server, peer.Ack(*self._name(flight)))
        self._timers.arm(stream, now, min(max(stream.ack_rto * 2, RTO_FLOOR), RTO_CEILING))

    # -- ends ---------------------------------------------------------------------------------

    def _complete(self, op: Op) -> None:
        ops = self._ops.get(op.key)
        if ops is not None and ops.get(op.version) is op:
            del ops[op.version]
            if not ops:
                del self._ops[op.key]
            self._actions.append(Complete(op))

    def _fail_round(self, round_: UnitRound, error: Callable[[Op], GradsumError]) -> None:
        """The round stays open towards the servers, but nobody here waits for it any more.

        Neither does anybody for later versions, which cannot begin before this one is done (V2).
        """
        round_.error = error
        for member in round_.stream.unit.members:
            for op in list(self._ops.get(member.key, {}).values()):
                self._fail(op, error(op))

    def _fail(self, op: Op, error: GradsumError) -> None:
        ops = self._ops.get(op.key)
        if ops is not None and ops.get(op.version) is op:
            del ops[op.version]
            if not ops:
                del self._ops[op.key]
        elif op in self._held:
            self._held.remove(op)
        else:
            return
        self._actions.append(Fail(op, error))
