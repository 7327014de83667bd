"""Engine: the protocol of one shard, without sockets, clock or threads (S1-S7, F1-F6, E7).

``step(event, now) -> actions``. Data frames and control records come in as events, bound to a rank
by the shell; sums, records and requests for the plan come out as actions. Control records are
collected and leave in one envelope per worker when the shell calls ``drain`` at the end of a batch.

Invariants: nothing is served before a plan names this incarnation (I4); a frame of another epoch or
an unknown key never reaches a slot; a sum is sent only to ranks that are owed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gradsum.errors import ProtocolError
from gradsum.proto import data, peer
from gradsum.proto.data import Header
from gradsum.proto.dtypes import CODES
from gradsum.proto.limits import PROTOCOL
from gradsum.scheduler.credit import FRAME_COST, Inflow, Skew
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.policy import SUM, Policy
from gradsum.scheduler.queue import Departure, TransferQueue
from gradsum.scheduler.slicing import Layout, Unit
from gradsum.scheduler.table import Table, TensorSpec
from gradsum.server.adder import Adder
from gradsum.server.slot import Done, Parking, Slot, Verdict

RESEND_AFTER: Final = 1.0
"""Seconds after which a sum that the reader has not seen is taken for lost (S5)."""

EXPIRE: Final = 0.030
"""Seconds after which holds are looked at again (F2)."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Event: a data frame of an attached worker."""

    rank: int
    header: Header
    payload: Any


@dataclass(frozen=True, slots=True)
class Records:
    """Event: control records of an attached worker, of the envelope's epoch."""

    rank: int
    epoch: int
    records: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Attached:
    """Event: both connections of a worker are bound, generation as it said."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Event: a plan is in force; this server stands at ``index`` in it."""

    plan: Plan
    index: int


@dataclass(frozen=True, slots=True)
class Extend:
    """Event: table entries from ``start`` on."""

    start: int
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Reset:
    """Event: the job is over."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: a deadline may have passed."""


Event = Frame | Records | Attached | Adopt | Extend | Reset | Tick


@dataclass(frozen=True, slots=True)
class SendSum:
    """Action: a sum leaves for a worker's data connection; payload None is header-only."""

    rank: int
    header: Header
    payload: Any


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Action: ask the coordinator for its plan and the table from ``start`` on."""

    start: int


Action = SendSum | FetchPlan
Sum = tuple[Slot, Done]


class Engine:
    """One shard's slots, credit and outgoing queue."""

    def __init__(
        self, *, window: int, skew: int, park_bytes: int, heartbeat: float, adder: Adder
    ) -> None:
        """window, skew, park_bytes: bytes; heartbeat: seconds between repeated grants."""
        self._window = window
        self._skew = Skew(skew)
        self._park_bytes = park_bytes
        self._heartbeat = heartbeat
        self._adder = adder
        self.counters = {"pushes": 0, "duplicates": 0, "sums": 0, "bytes_in": 0, "bytes_out": 0,
                         "parked": 0, "stale": 0, "rejected": 0}  # fmt: skip
        self._reset()

    def _reset(self) -> None:
        self.plan: Plan | None = None
        self.index = -1
        self.table = Table()
        self._coming: Adopt | None = None
        self._layout: Layout | None = None
        self._slots: dict[tuple[int, int], Slot] = {}
        self._queue: TransferQueue[Sum] = TransferQueue(self._owed)
        self._inflows: dict[int, Inflow] = {}
        self._joined: set[int] = set()
        self._parking = Parking(self._park_bytes)
        self._early: list[tuple[Frame, int]] = []
        self._outbox: dict[int, list[Any]] = {}
        self._writers: dict[Policy, tuple[int, ...]] = {}
        self._readers: dict[Policy, tuple[int, ...]] = {}
        self._actions: list[Action] = []
        self._next_ping = 0.0
        self._arrivals = False

    # -- events ------------------------------------------------------------------------------

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event; the actions are to be carried out in order.

        Raises ProtocolError for a frame that breaks the protocol; the engine is unchanged then.
        """
        match event:
            case Frame():
                self._frame(event, now)
            case Records():
                self._records(event, now)
            case Attached():
                self._attached(event, now)
            case Adopt():
                self._adopt(event, now)
            case Extend():
                self._extend(event, now)
            case Reset():
                self._reset()
            case Tick():
                for departure in self._queue.overdue(now):
                    self._send(departure, now)
        self._depart(now)
        actions, self._actions = self._actions, []
        return actions

    def drain(self, now: float) -> dict[int, list[Any]]:
        """Control records per rank that are to be sent now, grants and heartbeats included."""
        if now >= self._next_ping:
            self._next_ping = now + self._heartbeat
            for rank in self._inflows:
                self._tell(rank, peer.Ping())
                self._grant(rank, now, always=True)
        elif self._arrivals or self._held():
            for rank in self._inflows:
                self._grant(rank, now, always=False)
        self._arrivals = False
        outbox, self._outbox = self._outbox, {}
        return outbox

    def next_deadline(self, now: float) -> float:
        """When Tick and drain are due."""
        return min(self._next_ping, now + EXPIRE) if self._held() else self._next_ping

    def owns(self, rank: int, incarnation: int, token: bytes) -> bool:
        """Whether the plan knows this member by this token (I2)."""
        plan = self.plan
        return (
            plan is not None
            and plan.members.get(rank) == incarnation
            and plan.tokens.get(rank) == token
        )

    # -- flow --------------------------------------------------------------------------------

    def _attached(self, event: Attached, now: float) -> None:
        inflow = self._inflows.get(event.rank)
        if inflow is None or inflow.generation != event.generation:
            fresh = Inflow(event.generation, self._window)
            fresh.progress = min((i.progress for i in self._inflows.values()), default=0)
            self._inflows[event.rank] = fresh
            self._queue.open(event.rank, event.generation, 0)
        self._tell(event.rank, peer.Attached(event.generation))
        self._grant(event.rank, now, always=True)

    def _grant(self, rank: int, now: float, always: bool) -> None:
        inflow = self._inflows[rank]
        ahead = self._skew.ahead(inflow, list(self._inflows.values()), now)
        grant = inflow.grant(ahead)
        if always or inflow.news(grant):
            inflow.told = grant
            self._tell(rank, peer.Credit(*grant))

    def _held(self) -> bool:
        return any(
            i.told is not None and i.told.hold < i.told.limit for i in self._inflows.values()
        )

    def _tell(self, rank: int, record: Any) -> None:
        self._outbox.setdefault(rank, []).append(record)

    # -- plan and table ----------------------------------------------------------------------

    def _adopt(self, event: Adopt, now: float) -> None:
        plan = event.plan
        if self.plan is not None and plan.epoch <= self.plan.epoch:
            return
        if plan.message.packed > len(self.table):  # its packing names keys not known here (E8)
            self._coming = event
            self._actions.append(FetchPlan(len(self.table)))
            return
        self.plan = plan
        self.index = event.index
        self._layout = plan.layout(self.table)
        self._slots.clear()
        self._queue.clear()
        self._parking = Parking(self._park_bytes)
        self._parking.used = sum(nbytes for _, nbytes in self._early)
        self._writers.clear()
        self._readers.clear()
        self._replay(now)

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
        self._replay(now)

    def _replay(self, now: float) -> None:
        """Frames that came before the plan or table they belong to (S1)."""
        early, self._early = self._early, []
        for frame, nbytes in early:
            self._parking.give(nbytes)
            try:
                self._push(frame, now)
            except ProtocolError:  # counted and answered; the others are still owed their turn
                continue

    def _writers_of(self, policy: Policy) -> tuple[int, ...]:
        if policy not in self._writers and self.plan is not None:
            self._writers[policy] = tuple(
                rank for rank in sorted(self.plan.members)
                if policy.writes(rank) and rank not in self._joined
            )  # fmt: skip
        return self._writers.get(policy, ())

    def _readers_of(self, policy: Policy) -> tuple[int, ...]:
        """A rank that has joined reads no sums, but the broadcasts that end its job (E7)."""
        if policy not in self._readers and self.plan is not None:
            self._readers[policy] = tuple(
                rank for rank in sorted(self.plan.members)
                if policy.reads(rank) and (policy.kind != SUM or rank not in self._joined)
            )  # fmt: skip
        return self._readers.get(policy, ())

    # -- pushes ------------------------------------------------------------------------------

    def _frame(self, frame: Frame, now: float) -> None:
        inflow = self._inflows.get(frame.rank)
        if inflow is None or frame.header.generation != inflow.generation:
            self.counters["stale"] += 1
            return
        inflow.arrived(frame.header.offset, now)
        self._arrivals = True
        if frame.header.kind not in (data.PUSH, data.ABSENT):
            raise ProtocolError(f"worker {frame.rank} sent {frame.header}")
        self._push(frame, now)

    def _push(self, frame: Frame, now: float) -> None:
        header, plan = frame.header, self.plan
        if plan is None or self._layout is None or header.epoch > plan.epoch:
            self._park_early(frame)
            return
        name = (header.key, header.slice, header.version)
        if header.epoch < plan.epoch:
            self._tell(frame.rank, peer.Nack(*name, "epoch", plan.epoch))
            return
        unit = self._layout.units.get(header.key)
        if unit is None:
            self._park_early(frame)
            return
        slot = self._slot(unit, header)
        self._check(unit, frame)
        every = unit.policy.kind == SUM
        verdict = slot.judge(frame.rank, header.version, every)
        if verdict is Verdict.COUNTED:
            verdict = self._contribute(slot, unit, frame, now)
        self._answer_push(slot, unit, frame, verdict, now)

    def _answer_push(
        self, slot: Slot, unit: Unit, frame: Frame, verdict: Verdict, now: float
    ) -> None:
        header = frame.header
        name = (header.key, header.slice, header.version)
        if verdict is Verdict.GAP:
            plan_epoch = self.plan.epoch if self.plan else 0
            self._tell(frame.rank, peer.Nack(*name, "gap", plan_epoch))
        elif verdict is Verdict.LATER:
            self._tell(frame.rank, peer.Later(*name, header.seq))
        elif verdict is not Verdict.HELD:
            self._tell(frame.rank, peer.Receipt(*name, header.seq))
        if verdict is Verdict.DUPLICATE:
            self.counters["duplicates"] += 1
            self._answer(slot, unit.policy, frame.rank, header.version, now)

    def _park_early(self, frame: Frame) -> None:
        nbytes = 0 if frame.payload is None else memoryview(frame.payload).nbytes
        if self._parking.take(nbytes + FRAME_COST):
            self._early.append((frame, nbytes + FRAME_COST))
            self.counters["parked"] += 1
        self._actions.append(FetchPlan(len(self.table)))

    def _slot(self, unit: Unit, header: Header) -> Slot:
        if header.slice >= len(unit.slices) or unit.slices[header.slice].server != self.index:
            self._refuse(header, f"slice {header.key}.{header.slice} is not held here")
        slot = self._slots.get((header.key, header.slice))
        if slot is None:
            slot = Slot(header.key, header.slice, unit.wire, self._base(unit))
            self._slots[header.key, header.slice] = slot
        return slot

    def _base(self, unit: Unit) -> int:
        if self.plan is None:
            raise ProtocolError("no plan yet")
        return self.plan.base(unit.key, self.table)

    def _check(self, unit: Unit, frame: Frame) -> None:
        header = frame.header
        if not unit.policy.writes(frame.rank):
            self._refuse(header, f"rank {frame.rank} does not write tensor key {header.key}")
        if header.kind == data.ABSENT:
            return
        length = unit.slices[header.slice].length
        held = 0 if frame.payload is None else memoryview(frame.payload).nbytes
        if not header.length == held == length or header.encoding != CODES[unit.wire]:
            self._refuse(
                header, f"{held} bytes of dtype code {header.encoding}, expected {length} of "
                f"{unit.wire}",
            )  # fmt: skip
        if unit.packed and len(header.mask) != (len(unit.members) + 7) // 8:
            self._refuse(header, "a packed buffer without its mask")

    def _refuse(self, header: Header, why: str) -> None:
        self.counters["rejected"] += 1
        name = (header.key, header.slice, header.version)
        self._tell(header.rank, peer.Nack(*name, why, self.plan.epoch if self.plan else 0))
        raise ProtocolError(f"{header}: {why}", peer=f"worker {header.rank}")

    def _contribute(self, slot: Slot, unit: Unit, frame: Frame, now: float) -> Verdict:
        header, rank = frame.header, frame.rank
        required = self._writers_of(unit.policy)
        ordered = self.plan is not None and self.plan.message.deterministic and len(required) > 2
        payload = None if header.kind == data.ABSENT else frame.payload
        if payload is None and header.kind == data.PUSH:
            payload = b""
        verdict = slot.contribute(
            rank, payload, int.from_bytes(header.mask, "little"), self._adder, self._parking,
            required if ordered else None,
        )  # fmt: skip
        if verdict is Verdict.LATER:
            return verdict
        self.counters["pushes"] += 1
        self.counters["bytes_in"] += header.length
        self._inflows[rank].progress += header.length + FRAME_COST
        if slot.open is not None:
            slot.open.priority = min(slot.open.priority, header.priority)
        if unit.policy.reads(rank):
            self._drop(slot, slot.acknowledge(rank, header.version - 1, explicit=False))
        self._progress(slot, unit.policy)
        return verdict

    def _progress(self, slot: Slot, policy: Policy) -> None:
        """Send RESENDs that are due, and complete the round when everybody is in."""
        for rank in slot.due():
            self._tell(rank, peer.Resend(slot.key, slot.index, slot.base + 1))
        if slot.open is None or slot.open.parked or not self.plan:
            return
        if any(r not in slot.open.contributed for r in self._writers_of(policy)):
            return
        members = len(self.plan.members) if policy.kind == SUM else 1
        done = slot.complete(members, self._readers_of(policy))
        self.counters["sums"] += 1
        for rank in sorted(done.owed):
            self._enqueue(slot, done, rank)
        if not done.owed:
            slot.done = None
            self._drop(slot, done)

    # -- sums --------------------------------------------------------------------------------

    def _enqueue(self, slot: Slot, done: Done, rank: int) -> None:
        if rank in self._inflows and rank not in done.queued:
            done.queued.add(rank)
            nbytes = 0 if done.payload is None else memoryview(done.payload).nbytes
            self._queue.push(rank, done.priority, nbytes + FRAME_COST, (slot, done))

    @staticmethod
    def _owed(rank: int, item: Sum) -> bool:
        return rank in item[1].owed

    def _depart(self, now: float) -> None:
        while (departure := self._queue.pop()) is not None:
            self._send(departure, now)

    def _send(self, departure: Departure[Sum], now: float) -> None:
        slot, done = departure.item
        rank, plan = departure.lane, self.plan
        done.queued.discard(rank)
        if plan is None:
            return
        done.sent[rank] = (departure.generation, departure.offset, now)
        length = 0 if done.payload is None else memoryview(done.payload).nbytes
        self.counters["bytes_out"] += length
        unit = self._layout.units[slot.key] if self._layout else None
        mask = b""
        if unit is not None and unit.packed:
            mask = done.mask.to_bytes((len(unit.members) + 7) // 8, "little")
        header = Header(
            data.SUM, PROTOCOL, plan.job, plan.epoch, slot.key, slot.index, done.version, rank,
            plan.members[rank], plan.servers[self.index].incarnation, departure.generation,
            departure.offset, departure.seq, done.priority, CODES[slot.wire], done.exponent, length,
            done.members, done.present, mask, 0,
        )  # fmt: skip
        self._actions.append(SendSum(rank, header, done.payload))

    def _drop(self, slot: Slot, done: Done | None) -> None:
        """Nobody is owed this round: say so to those who asked or wait for it (S4)."""
        if done is None:
            return
        policy = self._layout.units[slot.key].policy if self._layout else Policy()
        tell = set(done.acked)
        if policy.kind != SUM:
            tell.add(policy.root)
        for rank in tell:
            if rank in self._inflows:
                self._tell(rank, peer.Stable(slot.key, slot.index, done.version))

    # -- records -----------------------------------------------------------------------------

    def _records(self, event: Records, now: float) -> None:
        rank = event.rank
        for record in event.records:
            match record:
                case peer.Credit():
                    self._queue.grant(rank, *record)
                case peer.Pull() | peer.Ack():
                    self._asked(event, record, now)
                case peer.Standing():
                    self._standing(rank)
                case peer.Ping():
                    pass
                case _:
                    raise ProtocolError(f"worker {rank} sent {type(record).__name__}")

    def _asked(self, event: Records, record: peer.Pull | peer.Ack, now: float) -> None:
        plan = self.plan
        name = (record.key, record.slice, record.version)
        if plan is None or self._layout is None or event.epoch > plan.epoch:
            self._actions.append(FetchPlan(len(self.table)))
            return
        if event.epoch < plan.epoch:
            self._tell(event.rank, peer.Nack(*name, "epoch", plan.epoch))
            return
        unit = self._layout.units.get(record.key)
        if unit is None or record.slice >= len(unit.slices):
            self._tell(event.rank, peer.Open(*name, ()))
            return
        slot = self._slots.get((record.key, record.slice))
        base = self._base(unit) if slot is None else slot.base
        if slot is None and record.version > base:
            self._tell(event.rank, peer.Open(*name, ()))
        elif slot is None:
            self._tell(event.rank, peer.Stable(*name))
        elif isinstance(record, peer.Pull):
            self._answer(slot, unit.policy, event.rank, record.version, now)
        else:
            self._acked(slot, event.rank, record)

    def _acked(self, slot: Slot, rank: int, record: peer.Ack) -> None:
        if slot.done is not None and slot.done.version == record.version:
            self._drop(slot, slot.acknowledge(rank, record.version, explicit=True))
        elif record.version <= slot.base:
            self._tell(rank, peer.Stable(*record))

    def _answer(self, slot: Slot, policy: Policy, rank: int, version: int, now: float) -> None:
        """What S5 says to a PULL or a repeated push."""
        name = (slot.key, slot.index, version)
        if version > slot.base + 1:
            self._tell(rank, peer.Nack(*name, "gap", self.plan.epoch if self.plan else 0))
        elif version == slot.base + 1:
            self._tell(rank, peer.Open(*name, slot.missing(self._writers_of(policy))))
        elif slot.done is None or slot.done.version != version:
            self._tell(rank, peer.Stable(*name))
        elif rank in slot.done.owed and self._lost(slot.done, rank, now):
            self._enqueue(slot, slot.done, rank)
        else:
            self._tell(rank, peer.Queued(*name))

    def _lost(self, done: Done, rank: int, now: float) -> bool:
        """Whether a sum must be sent again: not on its way, and not just sent (S5)."""
        if rank in done.queued:
            return False
        sent = done.sent.get(rank)
        if sent is None:
            return True
        generation, offset, at = sent
        inflow = self._inflows.get(rank)
        if inflow is None or generation != inflow.generation:
            return True
        return self._queue.seen(rank) >= offset or now - at >= RESEND_AFTER

    def _standing(self, rank: int) -> None:
        self._tell(rank, peer.StandingSeen())
        if rank in self._joined:
            return
        self._joined.add(rank)
        self._writers.clear()
        self._readers.clear()
        for slot in list(self._slots.values()):
            policy = self._layout.units[slot.key].policy if self._layout else Policy()
            if policy.kind != SUM:
                continue
            slot.standing(rank, self._adder, self._parking)
            if slot.done is not None:
                self._drop(slot, slot.acknowledge(rank, slot.done.version, explicit=False))
            self._progress(slot, policy)
