"""Headers of the data connections: pushes towards servers, sums towards workers (I3).

A data message is ``[header]`` or ``[header][payload]``; the header is a msgpack array of at most
1 KiB, the payload raw bytes of the wire dtype. Everything is validated before a payload is touched.
A placed message has a Place instead of the payload, which lies in the sender's shared memory.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gradsum.errors import ProtocolError
from gradsum.proto.codec import pack, unpack
from gradsum.proto.limits import MAX_HEADER, MAX_INT, MAX_SLICE, PROTOCOL

PUSH: Final = 1
ABSENT: Final = 2
SUM: Final = 3
ATTACH: Final = 4
PLACED_PUSH: Final = 5
PLACED_SUM: Final = 6
KINDS: Final = {
    PUSH: "PUSH", ABSENT: "ABSENT", SUM: "SUM", ATTACH: "ATTACH",
    PLACED_PUSH: "PLACED_PUSH", PLACED_SUM: "PLACED_SUM",
}  # fmt: skip


class Header(NamedTuple):
    """What a data frame says of itself. Upwards ``rank`` is the sender's, downwards the reader's.

    offset: bytes sent on this connection including this frame (F1). exponent: payload *
    2**exponent is the sum (S2). members: the divisor; present: how many pushed; mask: presence of
    the tensors of a packed buffer, bit i of byte i // 8; checksum 0: none. An ATTACH carries its
    token in ``mask``.
    """

    kind: int
    protocol: int
    job: str
    epoch: int
    key: int
    slice: int
    version: int
    rank: int
    incarnation: int
    server_incarnation: int
    generation: int
    offset: int
    seq: int
    priority: int
    encoding: int
    exponent: int
    length: int
    members: int
    present: int
    mask: bytes
    checksum: int

    def __str__(self) -> str:
        name = KINDS.get(self.kind, "?")
        return (
            f"{name} k{self.key}.{self.slice} v{self.version} r{self.rank} e{self.epoch} "
            f"{self.length}B prio {self.priority}"
        )


_NUMBERS: Final = tuple(
    (index, name)
    for index, name in enumerate(Header._fields)
    if name not in ("job", "mask", "priority", "exponent")
)
_JOB, _MASK = Header._fields.index("job"), Header._fields.index("mask")
_SIGNED: Final = (Header._fields.index("priority"), Header._fields.index("exponent"))


def encode_header(header: Header) -> bytes:
    """Bytes of a header."""
    return pack(header)


def decode_header(data: bytes | memoryview) -> Header:
    """A checked header; ProtocolError names what is wrong, another version both versions."""
    fields = unpack(data, MAX_HEADER)
    if not isinstance(fields, tuple) or len(fields) < 2:
        raise ProtocolError("not a data header")
    if fields[1] != PROTOCOL:
        raise ProtocolError(f"data header of protocol {fields[1]!r}, this is {PROTOCOL}")
    if len(fields) != len(Header._fields):
        raise ProtocolError(f"data header of {len(fields)} fields, not {len(Header._fields)}")
    for index, name in _NUMBERS:
        if type(fields[index]) is not int or not 0 <= fields[index] <= MAX_INT:
            raise ProtocolError(f"data header field {name} is not a number in range")
    for index in _SIGNED:
        if type(fields[index]) is not int or abs(fields[index]) > MAX_INT:
            raise ProtocolError(f"data header field {Header._fields[index]} is not in range")
    if type(fields[_JOB]) is not str or type(fields[_MASK]) is not bytes:
        raise ProtocolError("data header with a wrong job or mask")
    header = Header(*fields)
    if header.kind not in KINDS or header.length > MAX_SLICE:
        raise ProtocolError(f"data header of kind {header.kind}, length {header.length}")
    return header


def attach(
    job: str, epoch: int, rank: int, incarnation: int, generation: int, token: bytes
) -> Header:
    """First frame of a worker's data connection: binds it to a rank by the token (I2)."""
    return Header(
        ATTACH, PROTOCOL, job, epoch, 0, 0, 0, rank, incarnation, 0, generation, 0, 0, 0, 0, 0, 0,
        0, 0, token, 0,
    )  # fmt: skip
