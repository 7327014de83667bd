"""The codec: typed tuples round trip; anything else is a ProtocolError and nothing but that."""

from __future__ import annotations

from typing import NamedTuple

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.errors import ProtocolError
from gradsum.proto.codec import Codec, pack, reader_of, unpack
from tests.proto.strategies import VALUES, junk, record


class Inner(NamedTuple):
    name: str
    size: int | None


class Outer(NamedTuple):
    inner: Inner
    many: tuple[Inner, ...]
    counts: dict[int, float]
    pair: tuple[int, bytes]
    flag: bool


CODEC = Codec((Inner, Outer))


@given(record(Outer))
def test_typed_tuples_round_trip_with_their_types(message: Outer) -> None:
    again = CODEC.decode(CODEC.encode(message))
    assert again == message
    assert type(again) is Outer
    assert type(again.inner) is Inner
    assert all(type(one) is Inner for one in again.many)


@given(VALUES)
def test_values_round_trip(value: object) -> None:
    assert unpack(pack(value)) == value


@given(junk())
def test_junk_is_a_protocol_error(raw: bytes) -> None:
    try:
        CODEC.decode(raw)
    except ProtocolError:
        return
    pytest.fail(f"junk was understood: {raw!r}")


@given(record(Outer), st.data())
def test_a_changed_byte_is_another_message_or_a_protocol_error(
    message: Outer, data: st.DataObject
) -> None:
    raw = bytearray(CODEC.encode(message))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(raw)))
    for changed in (bytes(raw), bytes(raw[:cut])):
        try:
            CODEC.decode(changed)
        except ProtocolError:
            continue


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (("Nobody", 1), "unknown message kind 'Nobody'"),
        (("Inner", "a"), "Inner: 1 fields, expected 2"),
        (("Inner", "a", 1, 2), "Inner: 3 fields, expected 2"),
        (("Inner", 5, 1), "Inner.name: wrong type, int"),
        (("Inner", "a", True), "Inner.size: wrong type, bool"),
        (("Inner", "a", 1.0), "Inner.size: wrong type, float"),
        (("Outer", ("a", 1), (), {}, (1, "text"), True), "Outer.pair: wrong type, str"),
        (("Outer", ("a", 1), (), {"1": 1.0}, (1, b""), True), "Outer.counts: wrong type, str"),
        ((), "no kind"),
        ((7,), "no kind"),
        ("Inner", "no kind"),
    ],
)
def test_what_is_wrong_is_named(value: object, why: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        CODEC.decode(pack(value))
    assert why in raised.value.message


def test_integers_serve_as_floats_and_nothing_else_is_converted() -> None:
    assert CODEC.decode(pack(("Outer", ("a", None), (), {1: 2}, (1, b""), False))).counts == {1: 2}


def test_more_than_the_limit_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="message of 5000 bytes, limit 4096"):
        unpack(b"\xc1" * 5000, 4096)


@pytest.mark.parametrize(
    "raw",
    [
        msgpack.packb(msgpack.ExtType(1, b"xx")),
        msgpack.packb(msgpack.Timestamp(1, 2)),
        b"\xdd\xff\xff\xff\xff",  # a list of 4 billion
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\x91" * 5_000 + b"\x01",  # nested too deep
        b"\x81\x80\x01",  # a map as the key of a map
        b"\xa2\xff\xfe",  # not UTF-8
        b"\x01\x01",  # more than one value
    ],
    ids=["ext", "timestamp", "list", "map", "bytes", "deep", "map key", "utf-8", "two"],
)
def test_hostile_msgpack_is_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a msgpack message"):
        unpack(raw, 1 << 16)


def test_readers_of_unions_take_the_first_that_fits() -> None:
    read = reader_of(int | str | None)
    assert [read(1), read("a"), read(None)] == [1, "a", None]
    with pytest.raises(TypeError):
        read(b"a")
