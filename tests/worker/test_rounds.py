"""Rounds: packing the members of a unit, and the timeout that measured round trips give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.scheduler.policy import Policy
from gradsum.scheduler.slicing import Member, Slice, Unit
from gradsum.worker.rounds import (
    RTO_FIRST,
    RTO_FLOOR,
    RTT_CEILING,
    Op,
    Outcome,
    Phase,
    RoundTrip,
    Stream,
    UnitRound,
    private,
)


def unit(*sizes: int) -> Unit:
    members, offset = [], 0
    for key, size in enumerate(sizes):
        members.append(Member(key, offset, size))
        offset += size
    slices = (Slice(0, 0, offset, 0),)
    return Unit(0, tuple(members), offset, "int8", Policy(pack="p"), slices)


def op(key: int, source: bytes | None, priority: int = 0) -> Op:
    view = None if source is None else memoryview(bytearray(source))
    return Op(key, f"t{key}", 1, view, None, priority)


def test_one_tensor_is_sent_from_where_it_lies() -> None:
    only = op(0, b"abcd")
    round_ = UnitRound(Stream(unit(4), 0), 1, (only,), True)
    round_.pack(private)
    assert round_.source is only.source
    assert round_.mask == b""


@given(st.lists(st.none() | st.binary(min_size=1, max_size=5), min_size=2, max_size=20))
def test_packed_members_lie_in_order_absent_ones_as_zeros_with_a_mask(
    sources: list[bytes | None],
) -> None:
    sizes = [3 if source is None else len(source) for source in sources]
    stream = Stream(unit(*sizes), 0)
    stream.buffer(private)[:] = b"\xee" * sum(sizes)  # what an earlier round left there
    ops = tuple(op(key, source) for key, source in enumerate(sources))
    round_ = UnitRound(stream, 1, ops, True)
    round_.pack(private)
    assert len(round_.mask) == (len(sources) + 7) // 8
    bits = int.from_bytes(round_.mask, "little")
    assert [bool(bits >> i & 1) for i in range(len(sources))] == [s is not None for s in sources]
    if bits == 0:
        assert round_.source is None  # a round of ABSENT has no payload
    else:
        want = [bytes(size) if s is None else s for s, size in zip(sources, sizes, strict=True)]
        assert round_.source is not None
        assert bytes(round_.source) == b"".join(want)


def test_a_stream_reuses_its_buffer() -> None:
    stream = Stream(unit(2, 2), 0)
    assert stream.buffer(private) is stream.buffer(private)


def test_a_round_is_as_urgent_as_its_most_urgent_member() -> None:
    round_ = UnitRound(Stream(unit(1, 1, 1), 0), 1, (op(0, b"a", 5), op(1, b"b", -2), op(2, None)),
                       True)  # fmt: skip
    assert round_.priority == -2
    assert [flight.phase for flight in round_.flights] == [Phase.QUEUED]


def test_an_op_has_an_outcome() -> None:
    one = op(0, b"a")
    one.present, one.members = True, 4
    assert one.outcome == Outcome(True, 4)


def test_the_timeout_before_any_measurement() -> None:
    assert RoundTrip().timeout == RTO_FIRST


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_the_timeout_stays_between_floor_and_ceiling(samples: list[float]) -> None:
    trip = RoundTrip()
    for sample in samples:
        trip.sample(sample)
        assert RTO_FLOOR <= trip.timeout <= RTT_CEILING


def test_the_timeout_follows_steady_round_trips() -> None:
    trip = RoundTrip()
    for _ in range(60):
        trip.sample(0.3)
    assert trip.timeout == pytest.approx(0.3, abs=0.01)
    for _ in range(60):
        trip.sample(0.001)
    assert trip.timeout == RTO_FLOOR
