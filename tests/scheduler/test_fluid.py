"""The fluid model: closed formulas, bounds, and a schedule worked out by hand."""

from __future__ import annotations

import pytest

from gradsum.scheduler.fluid import (
    POLICIES,
    all_reduce,
    fifo,
    iteration,
    optimum,
    ring_cost,
    service_cost,
)
from gradsum.scheduler.profiles import MODELS, Layer, Profile, profile

RATE = 1e9


@pytest.mark.parametrize(
    ("n", "k", "times"),
    [(4, 0, 1.5), (4, 1, 4 / 3), (4, 2, 1.2), (4, 4, 1.0), (4, 9, 1.0), (8, 4, 14 / 11),
     (2, 0, 1.0), (2, 2, 1.0), (1, 1, 1.0), (1, 0, 0.0)],
)  # fmt: skip
def test_cost_of_a_byte_is_byteps_formula(n: int, k: int, times: float) -> None:
    assert service_cost(n, k, RATE) * RATE == pytest.approx(times)


def test_no_servers_cost_what_a_ring_does() -> None:
    for n in (2, 3, 64):
        assert service_cost(n, 0, RATE) == pytest.approx(ring_cost(n, RATE))


def two(first: float, second: float) -> Profile:
    """Two layers of 1 and 3 bytes (by 4), a second of computation each way."""
    return Profile("two", (Layer("a", (1,), first, 1.0), Layer("b", (3,), second, 1.0)))


def test_by_hand() -> None:
    """Backward ends b at 1 and a at 2. At 4 bytes/s b takes 3 s and a 1 s.

    Urgent: b travels 1-2, a 2-3, b 3-5; a's forward 3-4, b's from 5 on: a step is 1 (b's forward)
    + 1 (b's backward) + 4 = 6. Oldest first, barrier: b 1-4, a 4-5, then both forwards: 7.
    """
    assert iteration(two(1, 1), 0.25, urgent=True, barrier=False) == pytest.approx(6)
    assert iteration(two(1, 1), 0.25, urgent=False, barrier=True) == pytest.approx(7)
    assert iteration(two(1, 1), 0.25, urgent=False, barrier=False) == pytest.approx(7)
    assert iteration(two(1, 1), 0.25, urgent=True, barrier=True) == pytest.approx(7)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("busy", [0.0, 0.5, 1.0, 2.0, 8.0])
def test_bounds(name: str, busy: float) -> None:
    shape = profile(name)
    rate = shape.nbytes / busy if busy else float("inf")
    best = optimum(shape, 4, 4, rate)
    assert best >= max(shape.seconds, busy) * (1 - 1e-9)
    for other in POLICIES.values():
        assert other(shape, 4, 4, rate) >= best * (1 - 1e-9)
    if not busy:
        assert best == pytest.approx(shape.seconds)


def test_what_scheduling_gains_on_vgg() -> None:
    """The gains that published systems report come from here: large layers near the end."""
    shape = profile("vgg16")
    rate = shape.nbytes / shape.seconds
    best = optimum(shape, 4, 4, rate)
    assert fifo(shape, 4, 4, rate) / best == pytest.approx(1.33, abs=0.01)
    assert all_reduce(shape, 4, 4, rate) / best == pytest.approx(1.83, abs=0.01)


def test_more_servers_never_make_it_slower_and_ranks_do_not_matter_to_the_model() -> None:
    shape = profile("resnet50")
    times = [optimum(shape, 10_000, k, shape.nbytes / 2) for k in (0, 100, 5000, 10_000)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5 * times[-1]
