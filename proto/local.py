"""Places: where a payload lies that stays in its sender's memory (DESIGN 7)."""

from __future__ import annotations

from typing import Final, NamedTuple

from gradsum.errors import ProtocolError
from gradsum.proto.codec import pack, unpack
from gradsum.proto.limits import MAX_INT

MAX_PLACE: Final = 64
"""Bytes of an encoded place."""


class Place(NamedTuple):
    """A byte of a segment: which process owns it, as which descriptor, and which file that must be.

    The length comes from the data header that the place travels with.
    """

    pid: int
    fd: int
    device: int
    inode: int
    offset: int


def encode_place(place: Place) -> bytes:
    """Bytes of a place."""
    return pack(place)


def decode_place(data: bytes | memoryview) -> Place:
    """A checked place; ProtocolError for anything else."""
    fields = unpack(data, MAX_PLACE)
    if not isinstance(fields, tuple) or len(fields) != len(Place._fields):
        raise ProtocolError("not a place in shared memory")
    for value in fields:
        if type(value) is not int or not 0 <= value <= MAX_INT:
            raise ProtocolError("a place in shared memory with a number out of range")
    return Place(*fields)
