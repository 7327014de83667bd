"""Records on the control connections between workers and servers (F4).

A control message is one envelope with many records, so that a batch of receipts, grants and stable
notes costs one frame. Up is towards the server, down towards the worker. Slices are named (key,
slice, version) with the key of their unit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gradsum.errors import ProtocolError
from gradsum.proto.codec import Codec, pack, reader_of, unpack
from gradsum.proto.limits import MAX_CONTROL, PROTOCOL


class Attach(NamedTuple):
    """Up, first: binds this connection to the envelope's rank; repeated until Attached.

    home: where the worker runs, "" when it wants no shared memory; probe: a Place of its own there.
    """

    token: bytes
    home: str
    probe: bytes


class Attached(NamedTuple):
    """Down: both connections of ``generation`` are bound; local: placed pushes can be read."""

    generation: int
    local: bool


class Unmapped(NamedTuple):
    """Down: a placed push could not be read; connect again without shared memory."""


class Stranger(NamedTuple):
    """Down: this connection is not bound to a rank (any more); attach again, new generation."""


class Ping(NamedTuple):
    """Both ways, each heartbeat period."""


class Credit(NamedTuple):
    """Both ways: a grant for the receiver's connection ``generation`` (F1, F2)."""

    generation: int
    seen: int
    hold: int
    limit: int


class Pull(NamedTuple):
    """Up: the sum has not come; S5."""

    key: int
    slice: int
    version: int


class Ack(NamedTuple):
    """Up: the sum is consumed (S4); repeated until Stable."""

    key: int
    slice: int
    version: int


class Standing(NamedTuple):
    """Up: ABSENT from here on for all tensors (E7); repeated until StandingSeen."""


class StandingSeen(NamedTuple):
    """Down: the answer to Standing."""


class Receipt(NamedTuple):
    """Down: a push arrived and counts; ends its timer."""

    key: int
    slice: int
    version: int
    seq: int


class Stable(NamedTuple):
    """Down: everybody has this sum; forget it (S4). True from whoever says it (I5)."""

    key: int
    slice: int
    version: int


class Open(NamedTuple):
    """Down: the sum is not complete; ``missing`` ranks, () when the slot is not open yet (S5)."""

    key: int
    slice: int
    version: int
    missing: tuple[int, ...]


class Nack(NamedTuple):
    """Down: not accepted. reason "epoch": adopt the plan of ``epoch``; "gap": a version skipped."""

    key: int
    slice: int
    version: int
    reason: str
    epoch: int


class Queued(NamedTuple):
    """Down: the sum is on its way already (S5)."""

    key: int
    slice: int
    version: int


class Later(NamedTuple):
    """Down: no room to park this push (S6); keep it until Resend or the timer."""

    key: int
    slice: int
    version: int
    seq: int


class Resend(NamedTuple):
    """Down: the turn of this push has come (S6)."""

    key: int
    slice: int
    version: int


PEER = Codec(
    (
        Attach, Attached, Unmapped, Stranger, Ping, Credit, Pull, Ack, Standing, StandingSeen,
        Receipt, Stable, Open, Nack, Queued, Later, Resend,
    )
)  # fmt: skip


class Envelope(NamedTuple):
    """Who speaks, of which epoch; ``generation`` is the worker's connection generation."""

    protocol: int
    job: str
    epoch: int
    rank: int
    incarnation: int
    server_incarnation: int
    generation: int
    records: tuple[Any, ...]


_READ = reader_of(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    """Bytes of an envelope with its records."""
    records = tuple((type(record).__name__, *record) for record in envelope.records)
    return pack(envelope._replace(records=records))


def decode_envelope(data: bytes | memoryview) -> Envelope:
    """A checked envelope with checked records; ProtocolError for anything else."""
    raw = unpack(data, MAX_CONTROL)
    if isinstance(raw, tuple) and raw and raw[0] != PROTOCOL:
        raise ProtocolError(f"control message of protocol {str(raw[0])[:20]}, this is {PROTOCOL}")
    try:
        envelope: Envelope = _READ(raw)
    except TypeError as error:
        raise ProtocolError(f"not a control message: {error}") from None
    return envelope._replace(records=tuple(map(PEER.build, envelope.records)))
