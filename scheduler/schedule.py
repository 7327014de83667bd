"""Schedules: how the one queue decides, ours and those it is measured against (DESIGN 6).

Each is a setting of the same TransferQueue on workers and servers, not code of its own:

* gradsum: by urgency on both ways; slices by the measured links, some of their time under way.
* fifo: in the order in which tensors became ready, the rest as ours.
* p3: by urgency, small slices, one under way to each receiver (P3: stop and wait).
* bytescheduler: pushes by urgency, large slices, four of them under way (ByteScheduler's partition
  and credit as published); replies in the order in which sums are ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class Schedule(NamedTuple):
    """slice_bytes None: as the links are; slices None: under way is what the link carries."""

    urgent_pushes: bool = True
    urgent_replies: bool = True
    slice_bytes: int | None = None
    slices: int | None = None

    def bound(self, measured: int | None, slice_bytes: int) -> int | None:
        """Bytes that may be under way over all receivers; None: no bound."""
        return measured if self.slices is None else self.slices * slice_bytes


OURS: Final = Schedule()

SCHEDULES: Final[Mapping[str, Schedule]] = MappingProxyType(
    {
        "gradsum": OURS,
        "fifo": Schedule(urgent_pushes=False, urgent_replies=False),
        "p3": Schedule(slice_bytes=200_000, slices=0),
        "bytescheduler": Schedule(urgent_replies=False, slice_bytes=4_000_000, slices=4),
    }
)
