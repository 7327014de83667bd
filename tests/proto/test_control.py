"""Messages to and from the coordinator: each kind round trips; junk is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.errors import ProtocolError
from gradsum.proto import control
from gradsum.proto.codec import pack
from gradsum.proto.control import CONTROL
from gradsum.proto.limits import MAX_CONTROL
from tests.proto.strategies import junk, record

KINDS = [
    kind for kind in vars(control).values() if isinstance(kind, type) and hasattr(kind, "_fields")
]
MESSAGES = [kind for kind in KINDS if kind is not control.ServerInfo]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_round_trips(kind: Any) -> None:
    @given(record(kind))
    def check(message: Any) -> None:
        again = CONTROL.decode(CONTROL.encode(message))
        assert again == message
        assert type(again) is kind

    check()


@given(record(control.PlanMessage))
def test_a_plan_keeps_the_types_of_its_servers(message: control.PlanMessage) -> None:
    again = CONTROL.decode(CONTROL.encode(message))
    assert all(type(server) is control.ServerInfo for server in again.servers)


@given(junk())
def test_junk_is_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        CONTROL.decode(raw)


@given(st.one_of(*map(record, MESSAGES)), st.data())
def test_a_changed_message_is_a_valid_one_or_a_protocol_error(
    message: Any, data: st.DataObject
) -> None:
    raw = bytearray(CONTROL.encode(message))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert type(CONTROL.decode(bytes(raw))) in MESSAGES
    except ProtocolError:
        return


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(ProtocolError, match="Fence.step: wrong type, str"):
        CONTROL.decode(pack(("Fence", 1, 2, "3")))


def test_a_message_has_a_limit() -> None:
    with pytest.raises(ProtocolError, match=f"limit {MAX_CONTROL}"):
        CONTROL.decode(b"\x00" * (MAX_CONTROL + 1))
