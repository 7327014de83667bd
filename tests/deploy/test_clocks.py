"""Offsets between clocks: planted ones are found again, as well as frames can tell."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.deploy.clocks import Offset, bounds, offsets

Frame = tuple[str, float, str, float]


def frame(planted: dict[str, float], source: str, target: str, at: float, delay: float) -> Frame:
    """A frame that leaves at ``at`` and takes ``delay``, as the two clocks show it."""
    return source, at + planted[source], target, at + delay + planted[target]


def test_equal_least_delays_give_the_offset_exactly() -> None:
    planted = {"a": 0.0, "b": 5.5}
    frames = [frame(planted, "a", "b", t, 0.25 + t) for t in (0.0, 1.0)]
    frames += [frame(planted, "b", "a", t, 0.25 + t) for t in (2.0, 0.5)]
    frames += [frame(planted, "b", "a", 3.0, 0.25)]
    assert bounds(frames) == {("a", "b"): 5.75, ("b", "a"): -5.25}
    found = offsets("a", {"a": 0, "b": 0}, bounds(frames))
    assert found == {"a": Offset(0, 0, "same clock"), "b": Offset(5.5, 0.25, "frames")}


def test_frames_between_processes_of_one_clock_say_nothing() -> None:
    assert bounds([("a", 1.0, "a", 0.5)]) == {}


def test_one_direction_is_a_bound_and_none_leaves_the_wall_clocks() -> None:
    walls = {"a": 1000.0, "b": 0.0, "c": 0.0, "d": 993.0}
    found = offsets("a", walls, {("a", "b"): 3.0, ("c", "a"): 2.0})
    assert found["b"] == Offset(3.0, None, "one way")
    assert found["c"] == Offset(-2.0, None, "one way")
    assert found["d"] == Offset(7.0, None, "wall clock")


def test_a_clock_that_is_reached_through_another_one() -> None:
    planted = {"a": 0.0, "b": -3.0, "c": 8.0}
    pairs = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")]
    frames = [frame(planted, *pair, 1.0, 0.5) for pair in pairs]
    found = offsets("a", dict.fromkeys(planted, 0.0), bounds(frames))
    assert found["b"] == Offset(-3.0, 0.5, "frames")
    assert found["c"] == Offset(8.0, 1.0, "frames")


@given(st.integers(2, 6), st.integers(0, 2**32))
def test_no_frame_arrives_before_it_left_and_errors_are_as_small_as_said(
    count: int, seed: int
) -> None:
    """Any delays, any planted offsets: corrected arrows point forward, and offsets are within."""
    dice = random.Random(seed)
    names = [f"c{i}" for i in range(count)]
    planted = {name: dice.uniform(-50, 50) for name in names}
    planted["c0"] = 0.0
    ring = [(a, b) for a, b in itertools.permutations(names, 2)
            if "c0" in (a, b) or dice.random() < 0.5]  # fmt: skip
    frames = [frame(planted, a, b, dice.uniform(0, 100), dice.uniform(0.001, 2.0))
              for a, b in ring for _ in range(5)]  # fmt: skip
    found = offsets("c0", dict.fromkeys(names, 0.0), bounds(frames))
    for a, left, b, arrived in frames:
        assert arrived - found[b].seconds >= left - found[a].seconds - 1e-9
    for name in names:
        error = found[name].error
        assert error is not None
        assert abs(found[name].seconds - planted[name]) <= error + 1e-9
        assert error <= 2.0


def test_clocks_that_drift_end_the_search_all_the_same() -> None:
    found = offsets("a", {"a": 0, "b": 0}, {("a", "b"): -1.0, ("b", "a"): -1.0})
    assert found["b"].error is not None
    assert found["b"].error < 0
    assert found["b"].seconds == pytest.approx(0.0)
