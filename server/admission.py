"""What is checked of a push before its payload is touched (I3)."""

from __future__ import annotations

from gradsum.proto import data
from gradsum.proto.dtypes import CODES
from gradsum.scheduler.slicing import Unit
from gradsum.server.events import Frame


def objection(unit: Unit, frame: Frame) -> str | None:
    """Why a push of a slice of ``unit`` cannot be right; None when it is well formed."""
    header = frame.header
    if not unit.policy.writes(frame.rank):
        return f"rank {frame.rank} does not write tensor key {header.key}"
    if header.kind == data.ABSENT:
        return None
    length = unit.slices[header.slice].length
    held = 0 if frame.payload is None else memoryview(frame.payload).nbytes
    if not header.length == held == length or header.encoding != CODES[unit.wire]:
        return (
            f"{held} bytes of dtype code {header.encoding}, expected {length} of {unit.wire} "
            f"(code {CODES[unit.wire]})"
        )
    if unit.packed and len(header.mask) != (len(unit.members) + 7) // 8:
        return "a packed buffer without its mask"
    return None
