"""Fences as such: numbers, steps, refusals, versions (E1, V3)."""

from __future__ import annotations

import pytest

from gradsum.proto.control import AtFence, Consume, Consumed, Fence, FenceAck
from gradsum.scheduler.fence import Change, Fences
from gradsum.scheduler.table import Table

from .cast import spec


@pytest.fixture
def table() -> Table:
    table = Table()
    for name, first in (("a", 1), ("b", 1), ("c", 6)):
        table.append(spec(name, 4, first=first))
    return table


def opened(*steps: int) -> Fences:
    fences = Fences()
    for step in steps:
        fences.seen(step)
    fences.request(Change(slice_bytes=4096))
    assert fences.open(3) is not None
    return fences


def test_a_fence_lies_one_above_the_highest_known_step() -> None:
    fences = opened(4, 9, 2)
    assert fences.current == Fence(1, 3, 10)


def test_steps_that_are_faster_than_news_are_met_further_ahead_each_time() -> None:
    fences = opened(4)
    found = [fences.ack(0, FenceAck(number, False, 10 * number)) for number in (1, 2, 3)]
    assert found == [Fence(2, 3, 12), Fence(3, 3, 24), Fence(4, 3, 38)]
    fences.abort()
    fences.request(Change())
    assert fences.open(4) == Fence(5, 4, 31), "the next change begins anew"


def test_one_at_a_time_and_equal_requests_once() -> None:
    fences = Fences()
    assert fences.open(1) is None
    for _ in range(3):
        fences.request(Change())
    fences.request(Change(pack_bytes=5))
    assert fences.open(1) == Fence(1, 1, 1)
    assert fences.open(1) is None
    fences.close()
    assert fences.open(2) == Fence(2, 2, 1)
    assert fences.change == Change(pack_bytes=5)
    fences.close()
    assert fences.open(2) is None


def test_a_refusal_gives_a_new_number_and_a_later_step_and_forgets_all_answers() -> None:
    fences = opened(4)
    fences.ack(0, FenceAck(1, True, 5))
    fences.arrive(0, AtFence(1, {}))
    assert fences.ack(1, FenceAck(1, False, 8)) == Fence(2, 3, 10)
    assert fences.awaited({0, 1}) == [0, 1]
    assert fences.ack(1, FenceAck(1, False, 8)) is None, "an old refusal"
    fences.arrive(0, AtFence(1, {}))
    fences.arrive(1, AtFence(2, {}))
    assert fences.aim({0, 1}, Table(), ()) is None, "rank 0 was at the old fence"
    fences.arrive(0, AtFence(2, {}))
    assert fences.aim({0, 1}, Table(), ()) == Consume(2, {})


def test_complete_needs_every_active_rank_and_at_least_one() -> None:
    fences = opened(0)
    fences.ack(0, FenceAck(1, True, 0))
    assert fences.aim({0}, Table(), ()) is None
    fences.arrive(0, AtFence(1, {}))
    assert fences.aim(set(), Table(), ()) is None
    assert fences.aim({0}, Table(), ()) == Consume(1, {})
    assert not fences.complete({0})
    fences.consumed(0, Consumed(1))
    assert fences.complete({0})
    assert not fences.complete({0, 1})
    assert not fences.complete(set())


def come(fences: Fences, rank: int, versions: dict[int, int]) -> None:
    """A rank is at fence 1."""
    fences.ack(rank, FenceAck(1, True, 0))
    fences.arrive(rank, AtFence(1, versions))


def test_e1_the_target_is_what_all_ranks_have_submitted(table: Table) -> None:
    fences = opened(0)
    come(fences, 0, {0: 7, 1: 3})
    assert fences.aim({0, 1}, table, ()) is None, "rank 1 is not there"
    come(fences, 1, {0: 8, 2: 9})
    assert fences.aim({0, 1}, table, ((1, 2),)) == Consume(1, {0: 7, 1: 2, 2: 5})
    assert fences.aim({0, 1}, table, ()) is None, "said once"
    assert fences.arrive(1, AtFence(1, {0: 9})) == Consume(1, {0: 7, 1: 2, 2: 5}), "it was lost"
    fences.consumed(0, Consumed(1))
    fences.consumed(1, Consumed(9))
    assert not fences.complete({0, 1})
    assert fences.awaited({0, 1}) == [1]
    fences.consumed(1, Consumed(1))
    assert fences.complete({0, 1})
    assert fences.target == {0: 7, 1: 2, 2: 5}


def test_abort_before_the_commit_only() -> None:
    fences = opened(0)
    fences.request(Change(pack_bytes=1))
    assert fences.abort() == 1
    assert fences.given_up == Fence(1, 3, 1)
    assert fences.open(3) is None, "what waited is given up too"
    fences.request(Change())
    assert fences.open(3) == Fence(2, 3, 1), "numbers are never used again"
    assert fences.given_up is None
    fences.commit()
    assert fences.abort() == 0
    assert fences.current == Fence(2, 3, 1)
    assert fences.ack(0, FenceAck(2, False, 50)) is None


def test_a_rank_that_missed_the_fence_is_told_again() -> None:
    fences = opened(0)
    assert fences.unheard(0, 0) == Fence(1, 3, 1)
    fences.ack(0, FenceAck(1, True, 0))
    assert fences.unheard(0, 0) is None
    assert fences.unheard(0, 1) == Fence(1, 3, 1), "it is there, yet we have not heard so"
    fences.arrive(0, AtFence(1, {}))
    assert fences.unheard(0, 2) is None


def test_ranks_at_a_fence_wait_for_the_others_a_limited_time() -> None:
    fences = opened(0)
    assert not fences.overdue(100.0, 30.0), "nobody stands at it, so nobody is held up"
    fences.arrive(0, AtFence(1, {}))
    assert not fences.overdue(200.0, 30.0)
    assert not fences.overdue(229.9, 30.0)
    fences.arrive(1, AtFence(1, {}))
    assert fences.overdue(230.0, 30.0)
    assert fences.ack(2, FenceAck(1, False, 8)) == Fence(2, 3, 10)
    assert not fences.overdue(240.0, 30.0), "a new fence, where nobody stands yet"
    fences.arrive(0, AtFence(2, {}))
    assert not fences.overdue(240.0, 30.0)
    fences.commit()
    assert not fences.overdue(999.0, 30.0), "servers have the plan: there is no way back"


def test_nonsense_steps_do_not_move_the_fence() -> None:
    fences = Fences()
    for step in (-5, 1 << 63, (1 << 64) - 1):
        fences.seen(step)
    fences.request(Change())
    assert fences.open(1) == Fence(1, 1, 1)
