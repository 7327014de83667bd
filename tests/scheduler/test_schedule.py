"""Schedules: the one queue under the settings of other systems."""

from __future__ import annotations

import pytest

from gradsum.config import load
from gradsum.errors import ConfigError
from gradsum.scheduler.coordinator import config_of
from gradsum.scheduler.queue import TransferQueue
from gradsum.scheduler.schedule import SCHEDULES
from gradsum.scheduler.uplink import START

MEASURED = 500_000


def leaves(name: str, slice_bytes: int) -> list[str]:
    """What leaves at once for two receivers, when the less urgent half was handed over first."""
    schedule = SCHEDULES[name]
    queue: TransferQueue[str] = TransferQueue(lambda *_: True, urgent=schedule.urgent_pushes)
    queue.bound = schedule.bound(MEASURED, slice_bytes)
    for lane in (0, 1):
        queue.open(lane, 1, 1 << 40)
    for urgency in (9, 5):
        for index in range(20):
            queue.push(index % 2, urgency, slice_bytes, f"{urgency}.{index}")
    found = []
    while (departure := queue.pop()) is not None:
        found.append(departure.item)
    return found


def test_ours_sends_the_urgent_as_far_as_the_link_was_measured() -> None:
    assert leaves("gradsum", 100_000) == [f"5.{i}" for i in range(6)]


def test_fifo_sends_the_oldest() -> None:
    assert leaves("fifo", 100_000) == [f"9.{i}" for i in range(6)]


def test_p3_has_one_slice_under_way_to_each_receiver() -> None:
    assert leaves("p3", 200_000) == ["5.0", "5.1"]


def test_bytescheduler_has_four_slices_under_way() -> None:
    assert leaves("bytescheduler", 4_000_000) == ["5.0", "5.1", "5.2", "5.3"]
    assert not SCHEDULES["bytescheduler"].urgent_replies


def test_slices_are_the_schedules_unless_they_are_set() -> None:
    def sizes(**flags: object) -> tuple[int, bool]:
        found = config_of(load(flags, {}), 2, 2)
        return found.slice_bytes, found.auto_slices

    assert sizes() == (START, True)
    assert sizes(schedule="p3") == (200_000, False)
    assert sizes(schedule="p3", slice_bytes=1000) == (1000, False)
    with pytest.raises(ConfigError, match="schedule cannot be 'lifo'"):
        load({"schedule": "lifo"}, {})
