"""Golden frames of protocol 1: bytes that were written once and must be understood for ever.

Each frame in tests/golden/ is two lines, the message as Python shows it and its bytes in hex. These
files change only when PROTOCOL does: a frame that no longer fits them is another protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradsum.proto import data, peer
from gradsum.proto.codec import pack, unpack
from gradsum.proto.control import CONTROL
from gradsum.proto.limits import PROTOCOL
from gradsum.scheduler.table import parse_spec

GOLDEN = Path(__file__).parents[1] / "golden"
Decode = Callable[[bytes], Any]
Encode = Callable[[Any], bytes]


def read_spec(frame: bytes) -> Any:
    return parse_spec(unpack(frame))


CODECS: dict[str, tuple[Decode, Encode]] = {
    "control": (CONTROL.decode, CONTROL.encode),
    "data": (data.decode_header, data.encode_header),
    "peer": (peer.decode_envelope, peer.encode_envelope),
    "specs": (read_spec, pack),
}


def frames(name: str) -> Iterator[tuple[str, bytes]]:
    """(the message as text, its bytes) of one golden file."""
    lines = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    for text, digits in zip(lines[::2], lines[1::2], strict=True):
        yield text, bytes.fromhex(digits)


CASES = [(name, text, frame) for name in CODECS for text, frame in frames(name)]


@pytest.mark.parametrize(
    ("name", "text", "frame"), CASES, ids=[f"{c[0]}-{c[1][:30]}" for c in CASES]
)
def test_a_golden_frame_means_what_it_meant_and_is_written_the_same(
    name: str, text: str, frame: bytes
) -> None:
    decode, encode = CODECS[name]
    message = decode(frame)
    assert repr(message) == text
    assert encode(message) == frame


def test_the_golden_frames_are_of_this_protocol() -> None:
    assert PROTOCOL == 1, "keep the old golden frames, add those of the new protocol"


def test_every_kind_of_message_has_a_golden_frame() -> None:
    seen = {type(CONTROL.decode(frame)).__name__ for _, frame in frames("control")}
    assert seen == set(CONTROL._kinds), "append repr(message) and encode(message).hex() of the new"
    envelopes = [peer.decode_envelope(frame) for _, frame in frames("peer")]
    records = {type(record).__name__ for envelope in envelopes for record in envelope.records}
    assert records == set(peer.PEER._kinds)
    assert {data.decode_header(frame).kind for _, frame in frames("data")} == set(data.KINDS)
