"""Uplink: rates of a link while it is busy, and the slices that follow from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.scheduler.uplink import (
    LARGEST,
    SMALLEST,
    START,
    UNDER_WAY,
    Uplink,
    slices_for,
)

MB = 1_000_000


def run(
    uplink: Uplink, rate: float, start: float, seconds: float, window: int = MB,
    frame: int = 250_000,
) -> float:  # fmt: skip
    """A busy spell at a rate: frames that arrive one after the other. Returns its end."""
    count = int(seconds * rate / frame)
    now = start
    uplink.departed(now)
    for number in range(count):
        now = start + (number + 1) * frame / rate
        left = min(window, (count - number - 1) * frame)
        if left:
            uplink.departed(now)
        uplink.arrived(frame, left, now)
    return now


def test_a_busy_link_is_measured() -> None:
    uplink = Uplink()
    assert uplink.rate == 0.0
    run(uplink, 25 * MB, 100.0, 1.0)
    assert uplink.rate == pytest.approx(25 * MB, rel=0.02)


def test_pauses_between_spells_do_not_count() -> None:
    uplink = Uplink()
    now = 0.0
    for _ in range(8):
        now = run(uplink, 50 * MB, now, 0.1) + 5.0
    assert uplink.rate == pytest.approx(50 * MB, rel=0.02)


def test_a_few_bytes_say_nothing() -> None:
    uplink = Uplink()
    for number in range(100):
        uplink.departed(float(number))
        uplink.arrived(1000, 0, number + 0.001)
    assert uplink.rate == 0.0


def test_one_sample_is_not_trusted_and_an_odd_one_does_not_move_the_median() -> None:
    uplink = Uplink()
    run(uplink, 25 * MB, 0.0, 0.045)
    assert uplink.rate == 0.0
    run(uplink, 25 * MB, 10.0, 0.5)
    run(uplink, 2_000 * MB, 20.0, 0.03)
    assert uplink.rate == pytest.approx(25 * MB, rel=0.02)


def test_a_changed_link_is_followed() -> None:
    uplink = Uplink()
    now = run(uplink, 60 * MB, 0.0, 1.0)
    run(uplink, 12 * MB, now, 2.0)
    assert uplink.rate == pytest.approx(12 * MB, rel=0.02)


def test_slices_fit_the_slowest_member_and_stay_for_small_differences() -> None:
    assert slices_for([25 * MB, 500 * MB], START) == 64 << 10
    assert slices_for([119 * MB], START) == 256 << 10
    assert slices_for([10_000 * MB], 64 << 10) == LARGEST
    assert slices_for([0.3 * MB], START) == SMALLEST
    assert slices_for([1_200 * MB], START) is None
    assert slices_for([40 * MB], 64 << 10) is None
    assert slices_for([], START) is slices_for([0.0, 1e9], START) is None


@given(st.floats(1e3, 1e12), st.floats(0.8, 1.25))
def test_what_was_chosen_is_not_changed_again_by_noise(rate: float, noise: float) -> None:
    chosen = slices_for([rate], 1 << 40)
    assert chosen is not None and SMALLEST <= chosen <= LARGEST and chosen & (chosen - 1) == 0
    assert slices_for([rate * noise], chosen) is None


def test_with_many_workers_slices_are_smaller() -> None:
    """A server takes in and hands out one copy for each of them."""
    assert slices_for([3_125 * MB] * 4, 64 << 10) == LARGEST
    assert slices_for([3_125 * MB] * 16, START) == 2 << 20
    assert slices_for([3_125 * MB] * 64, START) == 1 << 20
    assert slices_for([250 * MB] * 64, START) == 64 << 10


def test_the_capacity_is_what_the_link_carries_when_nobody_holds_it_back() -> None:
    """A slow receiver keeps something under way most of the time."""
    uplink = Uplink()
    now = 0.0
    for _ in range(6):
        now = run(uplink, 60 * MB, now, 0.1, frame=50_000)
        now = run(uplink, 12 * MB, now, 0.5, frame=50_000)
    assert uplink.rate < 20 * MB
    assert uplink.capacity == pytest.approx(60 * MB, rel=0.1)
    assert uplink.describe() == {"uplink": uplink.rate, "capacity": uplink.capacity}


def test_one_odd_sample_does_not_make_the_capacity() -> None:
    uplink = Uplink()
    now = run(uplink, 25 * MB, 0.0, 0.5, frame=50_000)
    assert uplink.rate and uplink.capacity == 0.0
    now = run(uplink, 25 * MB, now, 1.0, frame=50_000)
    run(uplink, 2_000 * MB, now, 0.03, frame=50_000)
    assert uplink.capacity == pytest.approx(25 * MB, rel=0.02)


def test_large_frames_that_come_in_together_are_no_capacity() -> None:
    """Four lanes of one frame each, whose last bytes come within a moment."""
    uplink = Uplink()
    for number in range(200):
        uplink.departed(number * 0.7)
        for lane in range(4):
            uplink.arrived(4 << 20, (3 - lane) << 22, number * 0.7 + 0.6 + 0.03 * lane)
    assert uplink.rate > 0 and uplink.capacity == 0.0


def test_what_may_be_under_way_covers_the_way_there_and_back() -> None:
    """On a long way as much as fills it, or the rate could never be reached."""
    near, far = Uplink(), Uplink()
    for uplink, trip in ((near, 0.001), (far, 0.080)):
        for number in range(20):
            now = number * 10.0
            uplink.departed(now)
            uplink.arrived(25_000, 1, now + trip)
            for part in range(1, 40):
                uplink.arrived(62_500, int(part < 39), now + trip + 0.0025 * part)
    assert near.bound == pytest.approx(near.rate * (UNDER_WAY + 0.001), rel=1e-5)
    assert far.bound == pytest.approx(far.rate * (UNDER_WAY + 0.080), rel=1e-5)
