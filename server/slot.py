"""Slot: the rounds of one slice, a versioned accumulator (S1-S4, S6). No I/O, no clock.

At any time a slot knows ``base``, the last complete version, at most one complete round that some
reader may still need, and at most one open round, base + 1. So a rank's clock is base + 1 when it
has contributed to the open round and base otherwise, and counting anybody twice is impossible:
contributors are a set, and a version that is not base + 1 never reaches the accumulator (S1).
"""

from __future__ import annotations

import enum
from typing import Any

from gradsum.server.adder import Accumulator, Adder


class Verdict(enum.Enum):
    """What a slot says of a push."""

    COUNTED = "counted"
    PARKED = "parked"  # its turn in rank order has not come (S6)
    LATER = "later"  # no room to park (S6)
    DUPLICATE = "duplicate"
    HELD = "held"  # a broadcast's previous round is still owed to somebody
    GAP = "gap"


class Parking:
    """Byte budget that all parked frames of a shard share (S6)."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, nbytes: int) -> bool:
        """Reserve bytes; False when they do not fit."""
        if self.used + nbytes > self.limit:
            return False
        self.used += nbytes
        return True

    def give(self, nbytes: int) -> None:
        """Return bytes."""
        self.used -= nbytes


class Round:
    """One open version of a slice."""

    __slots__ = ("contributed", "later", "mask", "order", "parked", "present", "priority", "sum",
                 "version")  # fmt: skip

    def __init__(self, version: int, order: tuple[int, ...] | None) -> None:
        self.version = version
        self.order = order
        self.contributed: set[int] = set()
        self.present = 0
        self.mask = 0
        self.priority = 1 << 62
        self.sum: Accumulator | None = None
        self.parked: dict[int, tuple[Any, int, int]] = {}
        self.later: set[int] = set()

    def turn(self, rank: int) -> bool:
        """Whether everybody before ``rank`` is in (always, in arrival order)."""
        if self.order is None:
            return True
        return all(r in self.contributed for r in self.order if r < rank)


class Done:
    """A complete version: immutable (S3), kept until nobody can ask for it again (S4)."""

    __slots__ = ("acked", "exponent", "mask", "members", "nbytes", "owed", "payload", "present",
                 "priority", "queued", "sent", "version")  # fmt: skip

    def __init__(self, round_: Round, payload: Any, exponent: int, members: int) -> None:
        self.version = round_.version
        self.priority = round_.priority
        self.present = round_.present
        self.mask = round_.mask
        self.payload = payload
        self.nbytes = 0 if payload is None else memoryview(payload).nbytes
        self.exponent = exponent
        self.members = members
        self.owed: set[int] = set()
        self.acked: set[int] = set()
        self.queued: set[int] = set()
        self.sent: dict[int, tuple[int, int, float, int]] = {}  # generation, offset, time, copies


class Slot:
    """Rounds of one slice; ``wire`` is the dtype that is added."""

    __slots__ = ("base", "done", "index", "key", "open", "wire")

    def __init__(self, key: int, index: int, wire: str, base: int) -> None:
        self.key = key
        self.index = index
        self.wire = wire
        self.base = base
        self.open: Round | None = None
        self.done: Done | None = None

    def judge(self, rank: int, version: int, everybody_writes: bool) -> Verdict:
        """What a push of ``version`` would be, without side effects (the table of S1)."""
        if version <= self.base:
            return Verdict.DUPLICATE
        if version > self.base + 1:
            return Verdict.GAP
        if self.open is not None and (
            rank in self.open.contributed or rank in self.open.parked
        ):
            return Verdict.DUPLICATE
        if not everybody_writes and self.done is not None and self.done.owed:
            return Verdict.HELD
        return Verdict.COUNTED

    def contribute(
        self, rank: int, payload: Any, mask: int, adder: Adder, parking: Parking,
        order: tuple[int, ...] | None,
    ) -> Verdict:  # fmt: skip
        """Take a push that judge() found new; payload None is an ABSENT. Returns what was done."""
        if self.open is None:
            self.open = Round(self.base + 1, order)
        round_ = self.open
        if payload is not None and not round_.turn(rank):
            nbytes = memoryview(payload).nbytes
            if not parking.take(nbytes):
                round_.later.add(rank)
                return Verdict.LATER
            round_.parked[rank] = (payload, mask, nbytes)
            return Verdict.PARKED
        self._count(round_, rank, payload, mask, adder)
        self._take_parked(round_, adder, parking)
        return Verdict.COUNTED

    def _count(
        self, round_: Round, rank: int, payload: Any, mask: int, adder: Adder
    ) -> None:
        round_.contributed.add(rank)
        round_.later.discard(rank)
        if payload is None:
            return
        round_.present += 1
        round_.mask |= mask
        if round_.sum is None:
            round_.sum = adder.start(self.wire, payload)
        else:
            round_.sum.add(payload)

    def _take_parked(self, round_: Round, adder: Adder, parking: Parking) -> None:
        for rank in sorted(round_.parked):
            if not round_.turn(rank):
                return
            payload, mask, nbytes = round_.parked.pop(rank)
            parking.give(nbytes)
            self._count(round_, rank, payload, mask, adder)

    def standing(self, rank: int, adder: Adder, parking: Parking) -> None:
        """The rank is ABSENT from now on (E7); what it has contributed stays."""
        if self.open is not None and rank not in self.open.contributed:
            self.open.contributed.add(rank)
            self._take_parked(self.open, adder, parking)

    def due(self) -> set[int]:
        """Ranks told LATER whose turn has come: they are asked to resend, once (S6)."""
        if self.open is None or not self.open.later:
            return set()
        due = {rank for rank in self.open.later if self.open.turn(rank)}
        self.open.later -= due
        return due

    def missing(self, required: tuple[int, ...]) -> tuple[int, ...]:
        """Required ranks that have not contributed to the open (or next unopened) version."""
        if self.open is None:
            return required
        return tuple(
            r for r in required if r not in self.open.contributed and r not in self.open.parked
        )

    def complete(self, members: int, readers: tuple[int, ...]) -> Done:
        """Close the open round: its sum becomes immutable and is owed to ``readers``."""
        round_ = self.open
        if round_ is None:
            raise ValueError(f"slot {self.key}.{self.index} has no open round")
        payload, exponent = (None, 0) if round_.sum is None else round_.sum.finish(members)
        done = Done(round_, payload, exponent, members)
        done.owed = set(readers)
        self.base, self.open, self.done = round_.version, None, done
        return done

    def acknowledge(self, rank: int, version: int, explicit: bool) -> Done | None:
        """The rank needs ``version`` no more; the dropped round when it was the last one (S4)."""
        done = self.done
        if done is None or done.version != version:
            return None
        done.owed.discard(rank)
        if explicit:
            done.acked.add(rank)
        if done.owed:
            return None
        self.done = None
        return done
