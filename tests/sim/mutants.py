"""Planted bugs: each breaks one rule of the real classes, by a patched method.

A simulator that cannot find these would prove nothing about the code that passes it. Each entry has
the rule it breaks; where the protocol has two defences against the same mistake, both are removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gradsum.proto import data, peer
from gradsum.proto.data import Header
from gradsum.scheduler.credit import Inflow
from gradsum.scheduler.queue import TransferQueue
from gradsum.server.adder import Adder, _Exact
from gradsum.server.egress import Egress
from gradsum.server.engine import Adopt as ServerAdopt
from gradsum.server.engine import Engine, Frame, SendSum
from gradsum.server.flow import Flow
from gradsum.server.slot import Done, Parking, Round, Slot, Verdict
from gradsum.worker.core import Core
from gradsum.worker.links import Link, Links
from gradsum.worker.rounds import Flight, Phase, Stream, UnitRound
from gradsum.worker.sums import scatter as scatter_of

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


def s1_same_version_counted_twice(patch: Patch) -> None:
    def judge(self: Slot, rank: int, version: int, everybody_writes: bool) -> Verdict:
        if version <= self.base:
            return Verdict.DUPLICATE
        return Verdict.COUNTED if version == self.base + 1 else Verdict.GAP

    patch.setattr(Slot, "judge", judge)


def s1_old_versions_counted(patch: Patch) -> None:
    def judge(self: Slot, rank: int, version: int, everybody_writes: bool) -> Verdict:
        if self.open is not None and rank in self.open.contributed:
            return Verdict.DUPLICATE
        return Verdict.COUNTED if version <= self.base + 1 else Verdict.GAP

    patch.setattr(Slot, "judge", judge)


def s1_frames_of_a_newer_epoch_taken(patch: Patch) -> None:
    real = Engine._push

    def push(self: Engine, frame: Frame, now: float) -> None:
        if self.plan is not None:
            epoch = min(frame.header.epoch, self.plan.epoch)
            frame = Frame(frame.rank, frame.header._replace(epoch=epoch), frame.payload)
        real(self, frame, now)

    patch.setattr(Engine, "_push", push)


def s3_one_buffer_for_two_rounds(patch: Patch) -> None:
    buffers: dict[int, bytearray] = {}
    real = Slot._count

    def count(
        self: Slot, round_: Round, rank: int, payload: Any, mask: int, adder: Adder
    ) -> None:
        if payload is not None and round_.sum is None:
            buffer = buffers.setdefault(id(self), bytearray(len(payload)))
            if len(buffer) != len(payload):
                buffer = buffers[id(self)] = bytearray(len(payload))
            buffer[:] = payload
            payload = buffer
        real(self, round_, rank, payload, mask, adder)

    patch.setattr(Slot, "_count", count)


def s4_sum_dropped_before_all_have_read(patch: Patch) -> None:
    real = Slot.acknowledge

    def acknowledge(self: Slot, rank: int, version: int, explicit: bool) -> Done | None:
        if self.done is not None and self.done.version == version:
            self.done.owed.clear()
        return real(self, rank, version, explicit)

    patch.setattr(Slot, "acknowledge", acknowledge)


def s4_stable_never_said(patch: Patch) -> None:
    real = Engine._tell

    def tell(self: Engine, rank: int, record: Any) -> None:
        if not isinstance(record, peer.Stable):
            real(self, rank, record)

    patch.setattr(Engine, "_tell", tell)


def s4_broadcast_goes_on_before_stable(patch: Patch) -> None:
    real = Core._receipt

    def receipt(self: Core, flight: Flight, seq: int, now: float) -> None:
        real(self, flight, seq, now)
        if flight.phase is Phase.ACKING:
            self._root_stable(flight, now)

    def judge(self: Slot, rank: int, version: int, everybody_writes: bool) -> Verdict:
        return judged(self, rank, version, True)

    judged = Slot.judge
    patch.setattr(Core, "_receipt", receipt)
    patch.setattr(Slot, "judge", judge)


def s4_acknowledged_once(patch: Patch) -> None:
    real = Core._acknowledge

    def acknowledge(self: Core, stream: Stream, now: float) -> None:
        if stream.last is not None and stream.ack_rto <= 0.1:
            real(self, stream, now)

    patch.setattr(Core, "_acknowledge", acknowledge)


def s5_no_pull(patch: Patch) -> None:
    real = Core._expired

    def expired(self: Core, flight: Flight, now: float) -> None:
        if flight.phase is not Phase.AWAIT:
            real(self, flight, now)

    patch.setattr(Core, "_expired", expired)


def s5_push_never_repeated(patch: Patch) -> None:
    real = Core._expired

    def expired(self: Core, flight: Flight, now: float) -> None:
        if flight.phase is not Phase.SENT:
            real(self, flight, now)

    patch.setattr(Core, "_expired", expired)


def s5_duplicates_not_answered(patch: Patch) -> None:
    real = Engine._answer_push

    def answer(
        self: Engine, slot: Slot, unit: Any, frame: Frame, verdict: Verdict, now: float
    ) -> None:
        if verdict is not Verdict.DUPLICATE:
            real(self, slot, unit, frame, verdict, now)

    patch.setattr(Engine, "_answer_push", answer)


def s5_false_receipt_and_open_ignored(patch: Patch) -> None:
    """A receipt for what was dropped is healed by OPEN, which lists the asker; here it is not."""
    real = Engine._tell

    def tell(self: Engine, rank: int, record: Any) -> None:
        real(self, rank, peer.Receipt(*record) if isinstance(record, peer.Later) else record)

    patch.setattr(Engine, "_tell", tell)
    patch.setattr(Slot, "due", lambda self: set())
    patch.setattr(Core, "_still_open", lambda self, flight, missing, now: None)


def s6_parked_twice_added_twice(patch: Patch) -> None:
    judged, contributed = Slot.judge, Slot.contribute

    def judge(self: Slot, rank: int, version: int, everybody_writes: bool) -> Verdict:
        again = self.open is not None and rank in self.open.parked and version == self.base + 1
        return Verdict.COUNTED if again else judged(self, rank, version, everybody_writes)

    def contribute(
        self: Slot, rank: int, payload: Any, mask: int, adder: Adder, parking: Parking, order: Any
    ) -> Verdict:
        if self.open is not None and rank in self.open.parked and payload is not None:
            self._count(self.open, rank, payload, mask, adder)
            return Verdict.COUNTED
        return contributed(self, rank, payload, mask, adder, parking, order)

    patch.setattr(Slot, "judge", judge)
    patch.setattr(Slot, "contribute", contribute)


def s6_later_is_the_end(patch: Patch) -> None:
    """RESEND is never sent, and the worker waits for it without a timer."""
    real = Core._expired

    def expired(self: Core, flight: Flight, now: float) -> None:
        if flight.phase is not Phase.LATER:
            real(self, flight, now)

    patch.setattr(Core, "_expired", expired)
    patch.setattr(Slot, "due", lambda self: set())


def f1_credit_counts_what_arrives(patch: Patch) -> None:
    """Grants count received bytes instead of absolute offsets, so lost frames leak credit."""

    def arrived(self: Inflow, offset: int, now: float) -> None:
        self.seen += 256
        self.last = now

    patch.setattr(Inflow, "arrived", arrived)


def f1_grants_not_repeated(patch: Patch) -> None:
    """Only news is told: a lost grant is never told again, and F3 does not help either."""

    def grant(self: Flow, rank: int, now: float, always: bool) -> Any:
        return real(self, rank, now, always and self._inflows[rank].told is None)

    real = Flow.grant
    patch.setattr(Flow, "grant", grant)
    patch.setattr(TransferQueue, "overdue", lambda self, now: [])


def f3_nothing_beyond_the_grant(patch: Patch) -> None:
    patch.setattr(TransferQueue, "overdue", lambda self, now: [])


def f6_stranger_ignored(patch: Patch) -> None:
    patch.setattr(Links, "strange", lambda self, server: False)


def i5_sum_of_another_version_taken(patch: Patch) -> None:
    real = Core._awaited

    def awaited(self: Core, server: int, header: Header) -> Flight | None:
        stream = self._streams.get(header.key)
        if stream is not None and stream.round is not None:
            header = header._replace(version=stream.round.version)
        return real(self, server, header)

    patch.setattr(Core, "_awaited", awaited)


def i5_sum_of_an_old_epoch_taken(patch: Patch) -> None:
    """Neither epoch nor version protect: at a fence all old versions are consumed (E1)."""
    real = Core._awaited

    def awaited(self: Core, server: int, header: Header) -> Flight | None:
        stream = self._streams.get(header.key)
        if self.plan is not None and header.epoch < self.plan.epoch:
            if stream is not None and stream.round is not None:
                header = header._replace(epoch=self.plan.epoch, version=stream.round.version)
        return real(self, server, header)

    patch.setattr(Core, "_awaited", awaited)


def v5_absent_not_counted(patch: Patch) -> None:
    real = Engine._push

    def push(self: Engine, frame: Frame, now: float) -> None:
        if frame.header.kind != data.ABSENT:
            real(self, frame, now)

    patch.setattr(Engine, "_push", push)


def v5_absent_not_declared(patch: Patch) -> None:
    real = Core._enqueue

    def enqueue(self: Core, flight: Flight) -> None:
        if flight.round.source is not None:
            real(self, flight)
        else:
            flight.phase = Phase.AWAIT
            self._timers.arm(flight, 0.0, 0.25)

    patch.setattr(Core, "_enqueue", enqueue)


def v5_mask_ignored(patch: Patch) -> None:
    real = scatter_of

    def scatter(flight: Flight, header: Header, payload: memoryview | None) -> Any:
        everybody = b"\xff" * len(header.mask) if header.present else header.mask
        return real(flight, header._replace(mask=everybody), payload)

    patch.setattr("gradsum.worker.core.scatter", scatter)


def v2_next_version_before_the_sum(patch: Patch) -> None:
    """The caller's memory is given back when the first slice of a broadcast has arrived."""

    def written(self: Core, round_: UnitRound) -> None:
        for op in round_.ops:
            op.present, op.members = True, 1
            self._complete(op)

    patch.setattr(Core, "_written", written)


def e7_standing_said_once(patch: Patch) -> None:
    real = Links._beat

    def beat(self: Links, link: Link, now: float) -> None:
        real(self, link, now)
        if self._joined:
            link.standing = True

    patch.setattr(Links, "_beat", beat)
    patch.setattr(Links, "joined_everywhere", lambda self: self._joined)


def e7_standing_forgets_open_rounds(patch: Patch) -> None:
    def standing(self: Engine, rank: int) -> None:
        self._tell(rank, peer.StandingSeen())
        self._holding.join(rank)

    patch.setattr(Engine, "_standing", standing)


def s3_shared_memory_of_a_sum_returns_when_it_is_sent(patch: Patch) -> None:
    real = Egress._send

    def send(self: Egress, departure: Any, plan: Any, now: float) -> SendSum:
        action = real(self, departure, plan, now)
        done = departure.item[1]
        if done.payload is not None and done.owed <= done.sent.keys():
            done.payload = bytes(done.payload)
        return action

    patch.setattr(Egress, "_send", send)


def s2_a_lonely_payload_stays_in_its_senders_memory(patch: Patch) -> None:
    patch.setattr(_Exact, "finish", lambda self, members: (self._payload, 0))


def e7_joined_ranks_leave_the_divisor(patch: Patch) -> None:
    real = Slot.complete

    def complete(self: Slot, members: int, readers: tuple[int, ...]) -> Done:
        return real(self, len(readers) if members > 1 else members, readers)

    patch.setattr(Slot, "complete", complete)


def e8_plan_adopted_without_its_table(patch: Patch) -> None:
    real = Engine._adopt

    def adopt(self: Engine, event: ServerAdopt, now: float) -> None:
        message = event.plan.message
        known = tuple(key for key in message.packing if key < len(self.table))
        if len(known) < len(message.packing):
            plan = type(event.plan).of(
                message._replace(packing=known, packed=min(message.packed, len(self.table)))
            )
            event = ServerAdopt(plan, event.index)
        real(self, event, now)

    patch.setattr(Engine, "_adopt", adopt)


MUTANTS: dict[str, Mutant] = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and name[0] in "sfive" and name[1:2].isdigit()
}
