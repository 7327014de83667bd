"""What the worker's core keeps of a transfer: operations, streams, rounds and flights.

An Op is one tensor's part in one version, as the training thread submitted it. A Stream is the
sequence of versions of one unit; it has at most one open round, so version v + 1 waits until sum(v)
is in (V2). A Flight is one slice of the open round on its way.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from gradsum.errors import GradsumError
from gradsum.scheduler.slicing import Slice, Unit

Allocate = Callable[[int], memoryview]
"""Writable memory of so many bytes."""


def private(nbytes: int) -> memoryview:
    """Memory that only this process sees."""
    return memoryview(bytearray(nbytes))


class Outcome(NamedTuple):
    """How a round ended: whether anybody pushed (V5), and the divisor."""

    present: bool
    members: int


class Sink(Protocol):
    """Takes the sum of one tensor, piece by piece, on the comm thread."""

    def write(self, offset: int, payload: memoryview, members: int, exponent: int) -> None:
        """Wire bytes of the sum at byte ``offset`` of the tensor; must not keep ``payload``."""


class Op:
    """One tensor in one version. source None: ABSENT, or a reader of a broadcast."""

    __slots__ = ("handle", "key", "members", "missing", "name", "present", "priority", "sink",
                 "since", "source", "version")  # fmt: skip

    def __init__(
        self, key: int, name: str, version: int, source: memoryview | None, sink: Sink | None,
        priority: int, handle: Any = None,
    ) -> None:  # fmt: skip
        self.key = key
        self.name = name
        self.version = version
        self.source = source
        self.sink = sink
        self.priority = priority
        self.handle = handle
        self.since = 0.0
        self.present = False
        self.members = 0
        self.missing: tuple[int, ...] | None = None

    @property
    def outcome(self) -> Outcome:
        """The result, once complete."""
        return Outcome(self.present, self.members)


class Phase(enum.IntEnum):
    """Where a flight is."""

    QUEUED = 1
    SENT = 2  # waits for the receipt
    LATER = 3  # the server had no room to park it (S6)
    AWAIT = 4  # waits for the sum
    ACKING = 5  # the root of a broadcast waits until all have it (S4)
    DONE = 6


class Flight:
    """One slice of the open round."""

    __slots__ = ("due", "kept", "phase", "round", "rto", "sent", "seq", "slice", "stable")

    def __init__(self, round_: UnitRound, slice_: Slice) -> None:
        self.round = round_
        self.slice = slice_
        self.phase = Phase.QUEUED
        self.due = float("inf")
        self.rto = 0.0
        self.sent = 0.0
        self.seq = 0
        self.stable = False
        self.kept: Any = None


class UnitRound:
    """The open version of a unit, or the last one while its sum is retained (E5)."""

    __slots__ = ("error", "flights", "left", "mask", "ops", "payloads", "priority", "source",
                 "stream", "version", "writes")  # fmt: skip

    def __init__(self, stream: Stream, version: int, ops: tuple[Op, ...], writes: bool) -> None:
        self.stream = stream
        self.version = version
        self.ops = ops
        self.writes = writes
        self.priority = min(op.priority for op in ops)
        self.mask = b""
        self.source: memoryview | None = None
        self.flights = tuple(Flight(self, slice_) for slice_ in stream.unit.slices)
        self.left = len(self.flights)
        self.payloads: list[Any] = []
        self.error: Callable[[Op], GradsumError] | None = None

    def give_back(self) -> None:
        """The sum is in: what was pushed is the caller's again (E5). Void timers may refer to this
        round for a while, so references end here and in ``release``."""
        self.ops = ()
        self.source = None

    def release(self) -> None:
        """Nobody can ask for the retained sum again."""
        self.payloads.clear()

    def pack(self, allocate: Allocate) -> None:
        """Collect the members' bytes: one tensor as it lies, several in the stream's buffer."""
        unit = self.stream.unit
        if not unit.packed:
            self.source = self.ops[0].source
            return
        bits = 0
        if any(op.source is not None for op in self.ops):
            buffer = self.stream.buffer(allocate)
            for index, (member, op) in enumerate(zip(unit.members, self.ops, strict=True)):
                piece = buffer[member.offset : member.offset + member.length]
                if op.source is None:
                    piece[:] = bytes(member.length)
                else:
                    piece[:] = op.source
                    bits |= 1 << index
            self.source = buffer
        self.mask = bits.to_bytes((len(unit.members) + 7) // 8, "little")


class Stream:
    """The versions of one unit."""

    __slots__ = ("_buffer", "_given", "ack_due", "ack_rto", "base", "last", "round", "unit")

    def __init__(self, unit: Unit, base: int) -> None:
        self.unit = unit
        self.base = base
        self.round: UnitRound | None = None
        self.last: UnitRound | None = None
        self.ack_due = float("inf")
        self.ack_rto = 0.0
        self._buffer: memoryview | None = None
        self._given = 0

    def gather(self, given: Callable[[int], bool]) -> bool:
        """Whether all members' keys are given; those seen are not asked for again at each call."""
        members = self.unit.members
        while self._given < len(members) and given(members[self._given].key):
            self._given += 1
        if self._given < len(members):
            return False
        self._given = 0
        return all(given(member.key) for member in members)

    def buffer(self, allocate: Allocate) -> memoryview:
        """The unit's own memory, reused each round: the previous sum is in by then."""
        if self._buffer is None:
            self._buffer = allocate(self.unit.nbytes)
        return self._buffer


RTO_FLOOR: Final = 0.1
RTO_FIRST: Final = 1.0
RTO_CEILING: Final = 2.0
RTT_CEILING: Final = 30.0
"""Seconds to wait for a receipt where links are so slow that round trips take as long."""


class RoundTrip:
    """Smoothed time from push to receipt of one server, and the timeout it gives (RFC 6298)."""

    __slots__ = ("_mean", "_spread")

    def __init__(self) -> None:
        self._mean: float | None = None
        self._spread = 0.0

    def sample(self, seconds: float) -> None:
        """A measurement of one transmission, never from one copy to another's receipt (Karn)."""
        if self._mean is None:
            self._mean, self._spread = seconds, seconds / 2
            return
        self._spread += (abs(self._mean - seconds) - self._spread) / 4
        self._mean += (seconds - self._mean) / 8

    @property
    def timeout(self) -> float:
        """Seconds after which a push without receipt is sent again."""
        if self._mean is None:
            return RTO_FIRST
        return min(max(self._mean + 4 * self._spread, RTO_FLOOR), RTT_CEILING)
