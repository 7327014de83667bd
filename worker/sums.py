"""Pure parts of taking sums in: which bytes belong to which tensor, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gradsum.errors import PeerLost, ProtocolError
from gradsum.proto import peer
from gradsum.proto.data import Header
from gradsum.worker.events import Deliver
from gradsum.worker.rounds import Flight, Op


def scatter(flight: Flight, header: Header, payload: memoryview | None) -> Iterator[Deliver]:
    """Hand the pieces of a slice to the tensors they belong to; notes divisor and presence (V5)."""
    round_, slice_ = flight.round, flight.slice
    unit = round_.stream.unit
    for index, (member, op) in enumerate(zip(unit.members, round_.ops, strict=True)):
        start = max(member.offset, slice_.offset)
        stop = min(member.offset + member.length, slice_.offset + slice_.length)
        if unit.packed and start >= stop:
            continue
        op.members = header.members
        if unit.packed:
            there = index < 8 * len(header.mask) and header.mask[index // 8] >> index % 8 & 1
        else:
            there = header.present > 0
        if not there:
            continue
        op.present = True
        if op.sink is not None and payload is not None:
            piece = payload[start - slice_.offset : stop - slice_.offset]
            yield Deliver(op.sink, start - member.offset, piece, header.members, header.exponent)


def gone_error(op: Op, ranks: Iterable[int]) -> PeerLost:
    """The error of an operation that waits for ranks that have left."""
    who = ", ".join(f"rank {rank}" for rank in sorted(ranks))
    return PeerLost(
        f"tensor {op.name!r} version {op.version}: {who} has left the job",
        peer=who, tensor=op.name,
        hint="call gradsum.join() on ranks that run out of data before the others",
    )  # fmt: skip


def refusal_error(op: Op, server: int, record: peer.Nack) -> ProtocolError:
    """The error of an operation whose push a server does not accept."""
    why = "a version was skipped" if record.reason == "gap" else record.reason
    return ProtocolError(
        f"server {server} refused tensor {op.name!r} version {record.version}: {why}",
        tensor=op.name, peer=f"server {server}",
    )  # fmt: skip
