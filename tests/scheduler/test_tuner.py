"""The tuner on synthetic links: what it finds, when it stops, that it begins anew, what it leaves.

The surfaces say how long a step takes; noise is a seeded factor on every step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from gradsum.scheduler.tuner import (
    GRID,
    PAUSE,
    Applied,
    GivenUp,
    Setting,
    State,
    Took,
    Tuner,
)

Surface = Callable[[Setting], float]
MBIT = 1e6 / 8
START = Setting(1 << 20, 8, 1 << 20)
LAG = 3


def link(rate: float, frame: float = 2e-4) -> Surface:
    """16 MB a step over a link of ``rate`` bytes/s where a frame costs ``frame`` seconds."""

    def seconds(it: Setting) -> float:
        sending, under_way = 16e6 / rate, it.slice_bytes * it.window
        starved = sending * max(0.0, rate * 1e-3 / under_way - 1) / 2
        packed = 200 * frame * math.sqrt(65536 / it.pack_bytes) + 0.3 * it.pack_bytes / rate
        frames = 16e6 / it.slice_bytes * frame
        late = 1.5 * it.slice_bytes / rate + min(under_way, 16e6) / rate / 4
        return 0.02 + sending + starved + packed + frames + late

    return seconds


def bowl(best: Setting) -> Surface:
    """Slower by the squared distance from ``best``, in octaves."""

    def seconds(it: Setting) -> float:
        return 0.1 * (1 + 0.02 * sum(math.log2(a / b) ** 2 for a, b in zip(it, best, strict=True)))

    return seconds


def drive(tuner: Tuner, surface: Surface, steps: int, noise: float = 0.0, seed: int = 0,
          current: Setting = START) -> tuple[Setting, list[tuple[int, Setting]]]:  # fmt: skip
    """Run ``steps`` steps; what is in force then, and every change with its step. A change comes
    into force LAG steps after it was asked for, as fences lie ahead."""
    chance, changes = random.Random(seed), []
    coming: tuple[int, Setting] | None = None
    for step in range(steps):
        if coming is not None and step >= coming[0]:
            current, coming = coming[1], None
            tuner.step(Applied(current), float(step))
            changes.append((step, current))
        seconds = surface(current) * math.exp(chance.gauss(0, noise))
        for setting in tuner.step(Took(seconds), float(step)):
            assert coming is None
            coming = (step + LAG, setting)
    return current, changes


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "surface",
    [
        link(100 * MBIT), link(500 * MBIT), link(1000 * MBIT), link(500 * MBIT, frame=1e-3),
        bowl(Setting(1 << 17, 4, 1 << 19)), bowl(Setting(1 << 21, 16, 1 << 21)),
    ],
)  # fmt: skip
def test_finds_97_percent_of_the_best_within_50_steps(surface: Surface, seed: int) -> None:
    """With 0.5 % of noise on every step."""
    tuner = Tuner(START)
    found, _ = drive(tuner, surface, 50, noise=0.005, seed=seed)
    assert tuner.state is State.SETTLED
    assert min(map(surface, GRID)) / surface(found) >= 0.97
    assert surface(found) < surface(START)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_much_noise_never_leaves_it_far_from_the_best(seed: int) -> None:
    surface = link(500 * MBIT)
    tuner = Tuner(START)
    found, _ = drive(tuner, surface, 50, noise=0.03, seed=seed)
    assert tuner.state is not State.SEARCHING
    assert (
        min(map(surface, GRID)) / surface(found) >= 0.92 > min(map(surface, GRID)) / surface(START)
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_slower_link_is_searched_anew_within_30_steps(seed: int) -> None:
    fast, slow = link(500 * MBIT), link(100 * MBIT)
    tuner = Tuner(START)
    before, _ = drive(tuner, fast, 60, noise=0.005, seed=seed)
    known = {point.setting: point.seconds for point in tuner.points}
    after, changes = drive(tuner, slow, 30, noise=0.005, seed=seed + 10, current=before)
    assert tuner.state is not State.SEARCHING
    assert changes
    assert slow(after) <= slow(before)
    assert min(map(slow, GRID)) / slow(after) >= 0.94
    assert known and all(point.seconds > 1.28 for point in tuner.points)  # nothing kept of before


def test_small_changes_of_the_time_are_no_new_link() -> None:
    surface = link(500 * MBIT)
    tuner = Tuner(START)
    found, _ = drive(tuner, surface, 50)
    again, changes = drive(tuner, lambda it: 1.12 * surface(it), 40, current=found)
    assert (again, changes, tuner.state) == (found, [], State.SETTLED)


def test_steps_before_the_last_change_comes_into_force_are_no_new_link() -> None:
    """They are those of the setting that was tried last, which may be far slower."""
    surface, tuner, current = bowl(Setting(1 << 21, 16, 1 << 21)), Tuner(START), START
    proposed: list[Setting] = []
    for step in range(200):
        proposed = tuner.step(Took(surface(current)), float(step))
        if tuner.state is not State.SEARCHING:
            break
        for current in proposed:
            tuner.step(Applied(current), float(step))
    assert proposed and tuner.asked
    for _ in range(5):
        assert tuner.step(Took(3 * surface(current)), 300.0) == []
    assert tuner.state is State.SETTLED
    tuner.step(Applied(proposed[0]), 301.0)
    assert not tuner.asked


def test_two_slow_steps_are_no_new_link() -> None:
    surface = link(500 * MBIT)
    tuner = Tuner(START)
    found, _ = drive(tuner, surface, 50)
    for seconds in (3.0, 3.0, surface(found), 3.0, 3.0):
        assert tuner.step(Took(seconds), 60.0) == []
    assert tuner.state is State.SETTLED


def searched(tuner: Tuner, surface: Surface) -> Setting:
    """What is in force right after the search, changes coming into force at once."""
    current = START
    for step in range(100):
        proposed = tuner.step(Took(surface(current)), float(step))
        for current in proposed:
            tuner.step(Applied(current), float(step))
        if tuner.state is not State.SEARCHING:
            return current
    raise AssertionError("the search does not end")


def test_what_is_usual_is_seen_after_the_search_and_not_in_it() -> None:
    """Steps between fences are slower than those that follow each other."""
    surface, tuner = link(500 * MBIT), Tuner(START)
    found = searched(tuner, lambda it: 1.2 * surface(it))
    again, changes = drive(tuner, surface, 40, current=found)
    assert (again, changes, tuner.state) == (found, [], State.SETTLED)
    drive(tuner, lambda it: 1.2 * surface(it), 5, current=found)
    assert tuner.state is State.SEARCHING, "slower than usual, though not than in the search"


def test_a_link_that_changed_while_the_search_ended_is_noticed() -> None:
    surface, tuner = link(500 * MBIT), Tuner(START)
    found = searched(tuner, surface)
    drive(tuner, lambda it: 1.4 * surface(it), 5, current=found)
    assert tuner.state is State.SEARCHING


@pytest.mark.parametrize("noise", [0.0, 0.005])
def test_a_flat_surface_is_left_alone(noise: float) -> None:
    tuner = Tuner(START)
    found, _ = drive(tuner, lambda it: 0.1 if it == START else 0.0995, 50, noise=noise)
    assert (tuner.state, found) == (State.LEFT_ALONE, START)


def test_the_same_events_give_the_same_proposals() -> None:
    runs = [drive(Tuner(START), link(500 * MBIT), 60, noise=0.02, seed=4) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0][1]) >= 9


def test_changes_lie_two_steps_apart() -> None:
    tuner = Tuner(START)
    surface = link(500 * MBIT)
    asked, current = [], START
    for step in range(50):
        for setting in tuner.step(Took(surface(current)), float(step)):
            asked.append(step)
            current = setting
            tuner.step(Applied(current), float(step))
    assert asked[:9] == list(range(1, 19, 2))
    assert all(point.steps == 2 for point in tuner.points)


def test_a_change_that_was_given_up_waits() -> None:
    tuner = Tuner(START)
    proposals = [tuner.step(Took(0.1), 1.0) for _ in range(2)]
    assert [len(it) for it in proposals] == [0, 1]
    assert tuner.asked
    for _ in range(2):  # asked for: nothing more until it is in force
        assert tuner.step(Took(0.3), 1.0) == []
    assert tuner.points[0].seconds == pytest.approx(0.2), "but what is in force is known better"
    tuner.step(GivenUp(), 2.0)
    assert [tuner.step(Took(0.1), 2.0 + PAUSE / 2) for _ in range(9)] == [[]] * 9
    assert tuner.step(Took(0.1), 2.0 + PAUSE) == proposals[1]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_nonsense_is_passed_over(seconds: float) -> None:
    tuner = Tuner(START)
    for _ in range(20):
        assert tuner.step(Took(seconds), 1.0) == []
    assert tuner.points == ()
    assert tuner.best == START
