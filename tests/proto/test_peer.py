"""Control envelopes between workers and servers: round trip, junk, other versions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.errors import ProtocolError
from gradsum.proto import peer
from gradsum.proto.codec import pack
from gradsum.proto.limits import MAX_CONTROL, PROTOCOL
from tests.proto.strategies import junk, record

KINDS = [
    peer.Attach, peer.Attached, peer.Unmapped, peer.Stranger, peer.Ping, peer.Credit, peer.Pull,
    peer.Ack,
    peer.Standing, peer.StandingSeen, peer.Receipt, peer.Stable, peer.Open, peer.Nack, peer.Queued,
    peer.Later, peer.Resend,
]  # fmt: skip
RECORDS = st.one_of(*map(record, KINDS))
ENVELOPES = record(peer.Envelope).flatmap(
    lambda e: st.lists(RECORDS, max_size=6).map(
        lambda records: e._replace(protocol=PROTOCOL, records=tuple(records))
    )
)
EMPTY = peer.Envelope(PROTOCOL, "job", 1, 2, 3, 4, 5, ())


@given(ENVELOPES)
def test_envelopes_round_trip_with_the_types_of_their_records(envelope: peer.Envelope) -> None:
    again = peer.decode_envelope(peer.encode_envelope(envelope))
    assert again == envelope
    assert list(map(type, again.records)) == list(map(type, envelope.records))


def test_every_record_of_the_module_travels() -> None:
    defined = {
        kind for kind in vars(peer).values()
        if isinstance(kind, type) and hasattr(kind, "_fields") and kind is not peer.Envelope
    }  # fmt: skip
    assert defined == set(KINDS)


@given(junk())
def test_junk_is_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        peer.decode_envelope(raw)


@given(ENVELOPES, st.data())
def test_a_changed_envelope_is_a_valid_one_or_a_protocol_error(
    envelope: peer.Envelope, data: st.DataObject
) -> None:
    raw = bytearray(peer.encode_envelope(envelope))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        changed = peer.decode_envelope(bytes(raw))
    except ProtocolError:
        return
    assert all(type(one) in KINDS for one in changed.records)


def test_another_protocol_is_refused_with_both_versions() -> None:
    with pytest.raises(ProtocolError, match=f"protocol 2, this is {PROTOCOL}"):
        peer.decode_envelope(pack(EMPTY._replace(protocol=2)))


@pytest.mark.parametrize(
    "records",
    [
        (("Pull", 1, 2),), (("Pull", 1, 2, "3"),), (("Nobody",),), ((),), (5,),
        (("Open", 1, 1, 1, 3),),
    ],
)  # fmt: skip
def test_a_wrong_record_spoils_its_envelope(records: Any) -> None:
    with pytest.raises(ProtocolError):
        peer.decode_envelope(pack(EMPTY._replace(records=records)))


@pytest.mark.parametrize("change", [{"rank": "0"}, {"epoch": None}, {"job": b"j"}, {"records": 1}])
def test_a_wrong_field_is_a_protocol_error(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="not a control message"):
        peer.decode_envelope(pack(EMPTY._replace(**change)))


def test_an_envelope_has_a_limit() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        peer.decode_envelope(b"\x00" * (MAX_CONTROL + 1))
