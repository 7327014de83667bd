"""The receiver's credit: absolute offsets, what is news, and how far a sender may run ahead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradsum.scheduler.credit import ACTIVE, Grant, Inflow, Skew


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.randoms())
def test_f1_a_window_beyond_the_highest_offset_whatever_was_lost_or_late(
    sizes: list[int], rng: object
) -> None:
    inflow = Inflow(1, 1_000)
    offsets, end = [], 0
    for size in sizes:
        end += size
        offsets.append(end)
    arrived = [offset for offset in offsets if rng.random() < 0.6]  # type: ignore[attr-defined]
    rng.shuffle(arrived)  # type: ignore[attr-defined]
    for now, offset in enumerate(arrived):
        inflow.arrived(offset, float(now))
    seen = max(arrived, default=0)
    assert inflow.grant() == Grant(1, seen, seen + 1_000, seen + 1_000)


def test_f1_news_is_an_eighth_of_the_window() -> None:
    inflow = Inflow(1, 1_000)
    assert inflow.news(inflow.grant())
    inflow.told = inflow.grant()
    inflow.arrived(124, 0.0)
    assert not inflow.news(inflow.grant())
    inflow.arrived(125, 0.0)
    assert inflow.news(inflow.grant())


def test_f1_a_new_connection_is_always_news() -> None:
    inflow = Inflow(2, 1_000)
    inflow.told = Grant(1, 5_000, 6_000, 6_000)
    assert inflow.news(inflow.grant())


def test_f2_a_hold_is_between_what_was_seen_and_the_limit() -> None:
    inflow = Inflow(1, 1_000)
    inflow.arrived(700, 0.0)
    assert inflow.grant(-50) == Grant(1, 700, 700, 1_700)
    assert inflow.grant(300) == Grant(1, 700, 1_000, 1_700)
    assert inflow.grant(9_999) == Grant(1, 700, 1_700, 1_700)


def test_f2_being_let_go_after_a_stop_is_news() -> None:
    inflow = Inflow(1, 1_000)
    inflow.arrived(700, 0.0)
    inflow.told = inflow.grant(0)
    assert inflow.news(inflow.grant(10))
    assert not inflow.news(inflow.grant(0))


def test_f2_ahead_counts_from_the_slowest_that_was_active_lately() -> None:
    fast, slow, silent = Inflow(1, 1), Inflow(1, 1), Inflow(1, 1)
    fast.progress, slow.progress, silent.progress = 900, 500, 0
    fast.last, slow.last, silent.last = 10.0, 10.0, 10.0 - 2 * ACTIVE
    skew, everybody = Skew(150), [fast, slow, silent]
    assert skew.ahead(fast, everybody, 10.001) == -250
    assert skew.ahead(slow, everybody, 10.001) == 550
    assert skew.ahead(fast, everybody, 10.0 + 2 * ACTIVE) is None  # ends by itself
    assert skew.ahead(fast, [fast], 10.0) is None
