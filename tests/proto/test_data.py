"""Data headers: round trip, limits, and every field checked before a payload is touched (I3)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.errors import ProtocolError
from gradsum.proto.codec import pack
from gradsum.proto.data import (
    ATTACH,
    KINDS,
    PUSH,
    SUM,
    Header,
    attach,
    decode_header,
    encode_header,
)
from gradsum.proto.limits import MAX_HEADER, MAX_INT, MAX_PACKED, MAX_SLICE, PROTOCOL
from tests.proto.strategies import junk

NUMBERS = st.integers(0, MAX_INT)
SIGNED = st.integers(-MAX_INT, MAX_INT)
FIELDS: dict[str, Any] = dict.fromkeys(Header._fields, NUMBERS) | {
    "kind": st.sampled_from(sorted(KINDS)), "protocol": st.just(PROTOCOL),
    "job": st.text(max_size=40), "priority": SIGNED, "exponent": SIGNED,
    "length": st.integers(0, MAX_SLICE), "mask": st.binary(max_size=MAX_PACKED // 8),
}  # fmt: skip
HEADERS = st.builds(Header, **FIELDS)
PLAIN = attach("job", 1, 2, 3, 4, b"token")


def changed(name: str, value: Any) -> bytes:
    """A header with one field that the type would not allow."""
    return pack(tuple(value if field == name else old for field, old in PLAIN._asdict().items()))


@given(HEADERS)
def test_headers_round_trip(header: Header) -> None:
    raw = encode_header(header)
    assert len(raw) <= MAX_HEADER
    assert decode_header(raw) == header
    assert decode_header(memoryview(raw)) == header


@given(junk(MAX_HEADER + 10))
def test_junk_is_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_header(raw)


@given(HEADERS, st.data())
def test_a_changed_header_is_a_valid_one_or_a_protocol_error(
    header: Header, data: st.DataObject
) -> None:
    raw = bytearray(encode_header(header))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        other = decode_header(bytes(raw))
    except ProtocolError:
        return
    assert other.kind in KINDS
    assert 0 <= other.length <= MAX_SLICE
    assert min(other.offset, other.version, other.key, other.slice) >= 0


@pytest.mark.parametrize("name", [n for n in Header._fields if n not in ("job", "mask")])
@pytest.mark.parametrize("value", [-MAX_INT - 1, 1 << 63, 1.5, True, None, "1", b"1"])
def test_numbers_must_be_numbers_in_range(name: str, value: Any) -> None:
    with pytest.raises(ProtocolError):
        decode_header(changed(name, value))


@pytest.mark.parametrize("name", [n for n in Header._fields if n not in (
    "job", "mask", "priority", "exponent")])  # fmt: skip
def test_only_priority_and_exponent_may_be_negative(name: str) -> None:
    with pytest.raises(ProtocolError):
        decode_header(changed(name, -1))


@pytest.mark.parametrize(
    ("name", "value"), [("job", b"j"), ("job", 1), ("mask", "m"), ("mask", None)]
)
def test_job_is_text_and_mask_is_bytes(name: str, value: Any) -> None:
    with pytest.raises(ProtocolError, match="wrong job or mask"):
        decode_header(changed(name, value))


def test_another_protocol_is_refused_with_both_versions() -> None:
    with pytest.raises(ProtocolError, match=f"protocol 99, this is {PROTOCOL}"):
        decode_header(pack((PUSH, 99, "whatever comes after")))


@pytest.mark.parametrize("count", [2, len(Header._fields) - 1, len(Header._fields) + 1])
def test_the_number_of_fields_is_exact(count: int) -> None:
    fields = (PUSH, PROTOCOL, *[0] * 40)
    with pytest.raises(ProtocolError, match=f"of {count} fields, not {len(Header._fields)}"):
        decode_header(pack(fields[:count]))


@pytest.mark.parametrize(
    ("name", "value"), [("kind", 0), ("kind", 99), ("length", MAX_SLICE + 1)]
)
def test_unknown_kinds_and_oversized_slices_are_refused(name: str, value: int) -> None:
    with pytest.raises(ProtocolError, match="kind|length"):
        decode_header(changed(name, value))


def test_a_full_mask_fits_into_a_header() -> None:
    header = PLAIN._replace(kind=SUM, mask=b"\xff" * (MAX_PACKED // 8), job="j" * 64)
    full = header._replace(
        offset=MAX_INT, seq=MAX_INT, version=MAX_INT, key=MAX_INT, slice=MAX_INT, epoch=MAX_INT,
        priority=-MAX_INT, checksum=MAX_INT,
    )  # fmt: skip
    assert len(encode_header(full)) <= MAX_HEADER
    assert decode_header(encode_header(full)) == full


def test_an_attach_carries_its_token_and_nothing_to_add() -> None:
    assert (PLAIN.kind, PLAIN.mask, PLAIN.rank, PLAIN.generation) == (ATTACH, b"token", 2, 4)
    assert (PLAIN.length, PLAIN.offset) == (0, 0)


def test_a_header_reads_well_in_a_log() -> None:
    header = PLAIN._replace(kind=PUSH, key=3, slice=1, version=9, length=4096, priority=-5)
    assert str(header) == "PUSH k3.1 v9 r2 e1 4096B prio -5"
