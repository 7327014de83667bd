"""Egress: sums on their way to their readers, by urgency and credit (F1, F3, S5). No I/O."""

from __future__ import annotations

from typing import Final

from gradsum.proto import data
from gradsum.proto.data import Header
from gradsum.proto.dtypes import CODES
from gradsum.proto.limits import PROTOCOL
from gradsum.proto.peer import Credit
from gradsum.scheduler.credit import FRAME_COST, NEWS
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.queue import Departure, TransferQueue
from gradsum.scheduler.schedule import OURS, Schedule
from gradsum.scheduler.uplink import Uplink
from gradsum.server.events import SendSum
from gradsum.server.holding import Holding
from gradsum.server.slot import Done, Slot

RESEND_AFTER: Final = 1.0
RESEND_LATEST: Final = 16.0
"""Seconds without news of the reader after which a sum that it has not seen is taken for lost (S5):
while others arrive it is on its way. They double with each copy, the link may only be slow."""

Sum = tuple[Slot, Done]


class Egress:
    """One lane per worker; a sum leaves only for ranks that are still owed it."""

    __slots__ = ("_holding", "_moved", "_queue", "_schedule", "nbytes", "uplink")

    def __init__(self, holding: Holding, schedule: Schedule = OURS) -> None:
        self._holding = holding
        self._schedule = schedule
        self._queue: TransferQueue[Sum] = TransferQueue(
            self._owed, NEWS, urgent=schedule.urgent_replies
        )
        self.uplink = Uplink()
        self._moved: dict[int, float] = {}
        self.nbytes = 0

    @staticmethod
    def _owed(rank: int, item: Sum) -> bool:
        return rank in item[1].owed

    def open(self, rank: int, generation: int) -> None:
        """A new connection of a worker; its first grant opens it."""
        self._queue.open(rank, generation, 0)

    def grant(self, rank: int, credit: Credit, now: float) -> None:
        """A worker lets us go on."""
        if rank in self._queue and credit.seen > self._queue.seen(rank):
            self._moved[rank] = now
        before = self._queue.arrived
        self._queue.grant(rank, *credit)
        self.uplink.arrived(self._queue.arrived - before, self._queue.under_way, now)
        plan = self._holding.plan
        if plan is not None:
            self._queue.bound = self._schedule.bound(self.uplink.bound, plan.message.slice_bytes)

    def clear(self) -> None:
        """A new plan: nothing of the old one is owed to anybody (E1)."""
        self._queue.clear()

    def add(self, slot: Slot, done: Done, rank: int) -> None:
        """Queue a sum for a reader, once."""
        if rank in done.queued or rank not in self._queue:
            return
        done.queued.add(rank)
        self._queue.push(rank, done.priority, done.nbytes + FRAME_COST, (slot, done))

    def lost(self, done: Done, rank: int, now: float) -> bool:
        """Whether a sum must be sent again: not on its way, and not just sent (S5)."""
        if rank in done.queued:
            return False
        sent = done.sent.get(rank)
        if sent is None or rank not in self._queue:
            return True
        generation, offset, at, times = sent
        if generation != self._queue.generation(rank):
            return True
        patience = min(RESEND_AFTER * 2 ** (times - 1), RESEND_LATEST)
        quiet = now - max(at, self._moved.get(rank, at))
        return self._queue.seen(rank) >= offset or quiet >= patience

    def leave(self, now: float, overdue: bool) -> list[SendSum]:
        """What may leave now; ``overdue``: also one sum of each lane that has stalled (F3)."""
        plan = self._holding.plan
        if plan is None:
            return []
        departures = self._queue.overdue(now) if overdue else []
        while (departure := self._queue.pop()) is not None:
            departures.append(departure)
        return [self._send(departure, plan, now) for departure in departures]

    def _send(self, departure: Departure[Sum], plan: Plan, now: float) -> SendSum:
        slot, done = departure.item
        rank = departure.lane
        done.queued.discard(rank)
        before = done.sent.get(rank)
        again = before is not None and before[0] == departure.generation
        times = before[3] + 1 if before is not None and again else 1
        done.sent[rank] = (departure.generation, departure.offset, now, times)
        self.nbytes += done.nbytes
        self.uplink.departed(now)
        unit = self._holding.unit(slot.key)
        mask = b""
        if unit is not None and unit.packed:
            mask = done.mask.to_bytes((len(unit.members) + 7) // 8, "little")
        header = Header(
            data.SUM, PROTOCOL, plan.job, plan.epoch, slot.key, slot.index, done.version, rank,
            plan.members[rank], plan.servers[self._holding.index].incarnation,
            departure.generation, departure.offset, departure.seq, done.priority,
            CODES[slot.wire], done.exponent, done.nbytes, done.members, done.present, mask, 0,
        )  # fmt: skip
        return SendSum(rank, header, done.payload)
