"""Engine: the protocol of one shard, without sockets, clock or threads (S1-S7, F1-F6, E7).

``step(event, now) -> actions``. Data frames and control records come in as events, bound to a rank
by the shell; sums, records and requests for the plan come out as actions. Control records are
collected and leave in one envelope per worker when the shell calls ``drain`` at the end of a batch.

Invariants: nothing is served before a plan names this incarnation (I4); a frame of another epoch or
an unknown key never reaches a slot; a sum is sent only to ranks that are owed it. The parts:
Holding knows plan, table and slots, Flow grants credit to senders, Egress queues sums for readers.
"""

from __future__ import annotations

from typing import Any, Final

from gradsum.errors import ProtocolError
from gradsum.proto import data, peer
from gradsum.proto.data import Header
from gradsum.scheduler.credit import FRAME_COST, Bounds
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.policy import SUM, Policy
from gradsum.scheduler.schedule import OURS, Schedule
from gradsum.scheduler.slicing import Unit
from gradsum.scheduler.table import Table
from gradsum.server.adder import Adder
from gradsum.server.admission import objection
from gradsum.server.egress import Egress
from gradsum.server.events import (
    Action,
    Adopt,
    Attached,
    Event,
    Extend,
    FetchPlan,
    Frame,
    Records,
    Reset,
    SendSum,
    Tick,
)
from gradsum.server.flow import Flow
from gradsum.server.holding import Holding
from gradsum.server.slot import Done, Parking, Slot, Verdict

__all__ = [
    "BATCH", "Action", "Adopt", "Attached", "Engine", "Event", "Extend", "FetchPlan", "Frame",
    "Records", "Reset", "SendSum", "Tick",
]  # fmt: skip


BATCH: Final = 4096
"""Records in one envelope; more wait for the next one, or it would exceed its limit of bytes."""

PATIENT: Final = frozenset({peer.Receipt, peer.Stable, peer.Queued})
"""Records that end timers of tenths of a second: they may wait for company."""


class Engine:
    """One shard's slots, credit and outgoing queue."""

    def __init__(
        self, *, bounds: Bounds, park_bytes: int, heartbeat: float, adder: Adder,
        schedule: Schedule = OURS,
    ) -> None:  # fmt: skip
        """park_bytes: bytes; heartbeat: seconds between repeated grants."""
        self._schedule = schedule
        self._bounds = bounds
        self._park_bytes = park_bytes
        self._heartbeat = heartbeat
        self._adder = adder
        self.counters = {"pushes": 0, "duplicates": 0, "sums": 0, "bytes_in": 0, "bytes_out": 0,
                         "parked": 0, "stale": 0, "rejected": 0, "unmapped": 0}  # fmt: skip
        self._reset()

    def _reset(self) -> None:
        self._holding = Holding()
        self._flow = Flow(self._bounds, self._heartbeat)
        self._egress = Egress(self._holding, self._schedule)
        self._parking = Parking(self._park_bytes)
        self._coming: Adopt | None = None
        self._early: list[tuple[Frame, int]] = []
        self._outbox: dict[int, list[Any]] = {}
        self._more = False
        self._pressing = False
        self._actions: list[Action] = []

    # -- the face ----------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._holding.plan

    @property
    def table(self) -> Table:
        """The known part of the tensor table."""
        return self._holding.table

    def info(self) -> dict[str, Any]:
        """Counters and the measured link, for the status and the placement."""
        return self.counters | self._egress.uplink.describe()

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
                pass
        self._actions += self._egress.leave(now, overdue=isinstance(event, Tick))
        self.counters["bytes_out"] = self._egress.nbytes
        actions, self._actions = self._actions, []
        return actions

    def drain(self, now: float) -> dict[int, list[Any]]:
        """Control records per rank that are to be sent now, grants and heartbeats included."""
        beat = self._flow.due(now)
        if self._flow.changed() or beat:
            for rank in self._flow.ranks:
                if beat:
                    self._tell(rank, peer.Ping())
                self._grant(rank, now, always=beat)
        outbox = {rank: records[:BATCH] for rank, records in self._outbox.items()}
        self._outbox = {
            rank: records[BATCH:] for rank, records in self._outbox.items() if records[BATCH:]
        }
        self._more = bool(self._outbox)
        self._pressing = False
        return outbox

    def pressing(self, now: float) -> bool:
        """Whether somebody waits for what ``drain`` gives: not for receipts and stable notes, which
        may be collected for a while."""
        return self._more or self._pressing or self._flow.pressing(now)

    @property
    def waiting(self) -> bool:
        """Whether ``drain`` has something to give."""
        return bool(self._outbox)

    def next_deadline(self, now: float) -> float:
        """When Tick and drain are due; at once when records are left over."""
        return now if self._more else self._flow.next_deadline(now)

    def owns(self, rank: int, incarnation: int, token: bytes) -> bool:
        """Whether the plan knows this member by this token (I2)."""
        plan = self.plan
        return (
            plan is not None
            and plan.members.get(rank) == incarnation
            and plan.tokens.get(rank) == token
        )

    def _tell(self, rank: int, record: Any) -> None:
        if type(record) not in PATIENT:
            self._pressing = True
        self._outbox.setdefault(rank, []).append(record)

    # -- connections -------------------------------------------------------------------------

    def _attached(self, event: Attached, now: float) -> None:
        if self._flow.attach(event.rank, event.generation):
            self._egress.open(event.rank, event.generation)
        self._tell(event.rank, peer.Attached(event.generation, event.local))
        self._grant(event.rank, now, always=True)

    def _grant(self, rank: int, now: float, always: bool) -> None:
        credit = self._flow.grant(rank, now, always)
        if credit is not None:
            self._tell(rank, credit)

    # -- plan and table ----------------------------------------------------------------------

    def _adopt(self, event: Adopt, now: float) -> None:
        if self.plan is not None and event.plan.epoch <= self.plan.epoch:
            return
        if event.plan.message.packed > len(self.table):  # its packing names unknown keys (E8)
            self._coming = event
            self._actions.append(FetchPlan(len(self.table)))
            return
        self._holding.adopt(event.plan, event.index)
        self._flow.resize(event.plan.message.slice_bytes, event.plan.message.window)
        self._egress.clear()
        self._parking = Parking(self._park_bytes)
        self._parking.used = sum(nbytes for _, nbytes in self._early)
        self._replay(now)

    def _extend(self, event: Extend, now: float) -> None:
        if event.start > len(self.table):
            self._actions.append(FetchPlan(len(self.table)))
            return
        self._holding.extend(event.start, event.specs)
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

    # -- pushes ------------------------------------------------------------------------------

    def _frame(self, frame: Frame, now: float) -> None:
        header = frame.header
        if not self._flow.arrived(frame.rank, header.generation, header.offset, now):
            self.counters["stale"] += 1
            return
        if header.kind not in (data.PUSH, data.ABSENT):
            raise ProtocolError(f"worker {frame.rank} sent {header}")
        self._push(frame, now)

    def _push(self, frame: Frame, now: float) -> None:
        header, plan = frame.header, self.plan
        if plan is None or header.epoch > plan.epoch:
            self._park_early(frame)
            return
        name = (header.key, header.slice, header.version)
        if header.epoch < plan.epoch:
            self._tell(frame.rank, peer.Nack(*name, "epoch", plan.epoch))
            return
        if not self._holding.means_us(header):
            self.counters["stale"] += 1
            return
        unit = self._holding.unit(header.key)
        if unit is None:
            self._park_early(frame)
            return
        slot = self._holding.slot(unit, header.slice)
        if slot is None:
            raise self._refuse(header, f"slice {header.key}.{header.slice} is not held here")
        why = objection(unit, frame)
        if why is not None:
            raise self._refuse(header, why)
        verdict = slot.judge(frame.rank, header.version, unit.policy.kind == SUM)
        if verdict is Verdict.COUNTED:
            verdict = self._contribute(slot, unit, frame, now)
        self._answer_push(slot, unit, frame, verdict, now)

    def _answer_push(
        self, slot: Slot, unit: Unit, frame: Frame, verdict: Verdict, now: float
    ) -> None:
        header = frame.header
        name = (header.key, header.slice, header.version)
        if verdict is Verdict.GAP:
            self._tell(frame.rank, peer.Nack(*name, "gap", self._holding.epoch))
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

    def _refuse(self, header: Header, why: str) -> ProtocolError:
        """Count and answer a frame that breaks the protocol; the error to raise."""
        self.counters["rejected"] += 1
        name = (header.key, header.slice, header.version)
        self._tell(header.rank, peer.Nack(*name, why, self._holding.epoch))
        return ProtocolError(f"{header}: {why}", peer=f"worker {header.rank}")

    def _contribute(self, slot: Slot, unit: Unit, frame: Frame, now: float) -> Verdict:
        header, rank = frame.header, frame.rank
        policy = unit.policy
        payload = None if header.kind == data.ABSENT else frame.payload
        if payload is None and header.kind == data.PUSH:
            payload = b""
        order = self._holding.writers(policy) if self._holding.ordered(policy) else None
        verdict = slot.contribute(
            rank, payload, int.from_bytes(header.mask, "little"), self._adder, self._parking, order
        )
        if verdict is Verdict.LATER:
            return verdict
        self.counters["pushes"] += 1
        self.counters["bytes_in"] += header.length
        if policy.kind == SUM:  # by what a round weighs, so that ABSENT and roots do not skew it
            self._flow.counted(rank, unit.slices[header.slice].length + FRAME_COST)
        if slot.open is not None:
            slot.open.priority = min(slot.open.priority, header.priority)
        if policy.reads(rank):
            self._drop(slot, slot.acknowledge(rank, header.version - 1, explicit=False))
        self._progress(slot, policy)
        return verdict

    def _progress(self, slot: Slot, policy: Policy) -> None:
        """Send RESENDs that are due, and complete the round when everybody is in."""
        for rank in slot.due():
            self._tell(rank, peer.Resend(slot.key, slot.index, slot.base + 1))
        if slot.open is None or slot.open.parked:
            return
        if any(r not in slot.open.contributed for r in self._holding.writers(policy)):
            return
        done = slot.complete(self._holding.members(policy), self._holding.readers(policy))
        self.counters["sums"] += 1
        for rank in sorted(done.owed):
            self._egress.add(slot, done, rank)
        if not done.owed:
            slot.done = None
            self._drop(slot, done)

    def _drop(self, slot: Slot, done: Done | None) -> None:
        """Nobody is owed this round: say so to those who asked or wait for it (S4)."""
        if done is None:
            return
        policy = self._holding.policy(slot)
        tell = set(done.acked)
        if policy.kind != SUM:
            tell.add(policy.root)
        for rank in tell:
            if rank in self._flow:
                self._tell(rank, peer.Stable(slot.key, slot.index, done.version))

    # -- records -----------------------------------------------------------------------------

    def _records(self, event: Records, now: float) -> None:
        rank = event.rank
        for record in event.records:
            match record:
                case peer.Credit():
                    self._egress.grant(rank, record, now)
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
        if plan is None or event.epoch > plan.epoch:
            self._actions.append(FetchPlan(len(self.table)))
            return
        if event.epoch < plan.epoch:
            self._tell(event.rank, peer.Nack(*name, "epoch", plan.epoch))
            return
        unit = self._holding.unit(record.key)
        if unit is None or record.slice >= len(unit.slices):
            self._tell(event.rank, peer.Open(*name, ()))
            return
        slot = self._holding.slots.get((record.key, record.slice))
        base = self._holding.base(unit) if slot is None else slot.base
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
            self._tell(rank, peer.Nack(*name, "gap", self._holding.epoch))
        elif version == slot.base + 1:
            self._tell(rank, peer.Open(*name, slot.missing(self._holding.writers(policy))))
        elif slot.done is None or slot.done.version != version:
            self._tell(rank, peer.Stable(*name))
        elif rank in slot.done.owed and self._egress.lost(slot.done, rank, now):
            self._egress.add(slot, slot.done, rank)
        else:
            self._tell(rank, peer.Queued(*name))

    def _standing(self, rank: int) -> None:
        """ABSENT from here on (E7): open rounds go on without the rank, it reads no more sums."""
        self._tell(rank, peer.StandingSeen())
        if rank in self._holding.joined:
            return
        self._holding.join(rank)
        for slot in list(self._holding.slots.values()):
            policy = self._holding.policy(slot)
            if policy.kind != SUM:
                continue
            slot.standing(rank, self._adder, self._parking)
            if slot.done is not None:
                self._drop(slot, slot.acknowledge(rank, slot.done.version, explicit=False))
            self._progress(slot, policy)
