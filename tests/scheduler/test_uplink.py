"""Uplink: rates of a link while it is busy, and the slices that follow from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.scheduler.uplink import LARGEST, SMALLEST, START, Uplink, slices_for

MB = 1_000_000


def run(uplink: Uplink, rate: float, start: float, seconds: float, window: int = MB) -> float:
    """A busy spell at a rate: 250 kB frames that arrive one after the other. Returns its end."""
    frame = 250_000
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
