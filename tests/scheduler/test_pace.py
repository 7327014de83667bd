"""Step times from fence points that were passed."""

from __future__ import annotations

from gradsum.scheduler.pace import Paces
from gradsum.scheduler.tuner import Took


def test_the_slowest_ranks_mean_counts_once_all_have_moved() -> None:
    paces = Paces()
    assert paces.take({0: (1, 10.0), 1: (1, 900.0)}) is None
    assert paces.take({0: (5, 12.0), 1: (1, 900.0)}) is None
    assert paces.take({0: (5, 12.0), 1: (4, 903.0)}) == Took(1.0, 3)
    assert paces.take({0: (5, 12.0), 1: (4, 903.0)}) is None, "nobody has moved"
    assert paces.take({0: (9, 14.0), 1: (8, 905.0)}) == Took(0.5, 4)


def test_steps_before_the_reset_do_not_count() -> None:
    paces = Paces()
    paces.take({0: (3, 1.0)})
    paces.reset(after=11)
    assert paces.take({0: (10, 2.0)}) is None
    assert paces.take({0: (11, 60.0)}) is None
    assert paces.take({0: (13, 61.0)}) == Took(0.5, 2)


def test_a_rank_that_has_gone_is_not_waited_for_and_one_without_a_word_is() -> None:
    paces = Paces()
    paces.take({0: (1, 1.0), 1: (1, 1.0)})
    assert paces.take({0: (2, 3.0), 1: None}) is None
    assert paces.take({0: (2, 3.0)}) == Took(2.0, 1)
    assert paces.take({}) is None
