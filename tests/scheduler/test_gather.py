"""Gathers, barriers and joins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradsum.proto.control import Failed, Gather, Gathered
from gradsum.proto.limits import MAX_GATHER
from gradsum.scheduler.gather import Gathers, Joins

NOBODY: set[int] = set()


def value(rank: int, turn: int = 1, tag: str = "t") -> Gather:
    return Gather(10 * turn + rank, tag, turn, b"v%d.%d" % (rank, turn))


def test_everybody_gets_everything_once_all_have_sent() -> None:
    gathers = Gathers()
    assert gathers.add(1, value(1), {0, 1}, NOBODY) == []
    assert gathers.waiting({0, 1}) == {"t": [0]}
    both = {0: b"v0.1", 1: b"v1.1"}
    assert gathers.add(0, value(0), {0, 1}, NOBODY) == [
        (1, Gathered(11, both)),
        (0, Gathered(10, both)),
    ]
    assert gathers.waiting({0, 1}) == {}


def test_a_repeated_request_counts_once_and_is_answered_again() -> None:
    gathers = Gathers()
    assert gathers.add(0, value(0), {0, 1}, NOBODY) == []
    assert gathers.add(0, value(0), {0, 1}, NOBODY) == []
    assert len(gathers.add(1, value(1), {0, 1}, NOBODY)) == 2
    both = {0: b"v0.1", 1: b"v1.1"}
    assert gathers.add(0, value(0), {0, 1}, NOBODY) == [(0, Gathered(10, both))]


def test_turns_of_a_tag_do_not_mix() -> None:
    gathers = Gathers()
    gathers.add(0, value(0, 1), {0, 1}, NOBODY)
    gathers.add(1, value(1, 1), {0, 1}, NOBODY)
    assert gathers.add(0, value(0, 2), {0, 1}, NOBODY) == []
    # rank 1 has not seen the first answer
    assert gathers.add(1, value(1, 1), {0, 1}, NOBODY)[0][1].req == 11
    letters = gathers.add(1, value(1, 2), {0, 1}, NOBODY)
    assert [letter.req for _, letter in letters] == [20, 21]
    # a straggler of the first turn opens nothing
    assert gathers.add(0, value(0, 1), {0, 1}, NOBODY) == []
    assert gathers.waiting({0, 1}) == {}


def test_c28_a_rank_that_left_fails_the_gather_and_is_named() -> None:
    gathers = Gathers()
    gathers.add(0, value(0), {0, 1, 2}, NOBODY)
    gathers.add(2, value(2), {0, 1, 2}, NOBODY)
    letters = gathers.settle({0, 2}, {1})
    assert [rank for rank, _ in letters] == [0, 2]
    failure = letters[0][1]
    assert isinstance(failure, Failed)
    assert (failure.req, failure.kind, failure.peer) == (10, "PeerLost", "worker 1")
    assert "rank 1 has left the job" in failure.message
    assert "join()" in failure.hint
    late = gathers.add(0, value(0, 2), {0, 2}, {1})
    assert isinstance(late[0][1], Failed)


def test_a_rank_that_sent_and_left_is_counted() -> None:
    gathers = Gathers()
    gathers.add(1, value(1), {0, 1}, NOBODY)
    assert gathers.settle({0}, {1}) == []
    letters = gathers.add(0, value(0), {0}, {1})
    assert (0, Gathered(10, {0: b"v0.1", 1: b"v1.1"})) in letters


def test_ranks_that_joined_are_left_out() -> None:
    gathers = Gathers()
    gathers.add(0, value(0), {0, 1}, NOBODY)
    assert gathers.settle({0}, NOBODY) == [(0, Gathered(10, {0: b"v0.1"}))]


def test_values_beyond_the_limits_fail_for_those_who_sent_them() -> None:
    gathers = Gathers()
    large = Gather(5, "t", 1, b"x" * (MAX_GATHER + 1))
    [(rank, answer)] = gathers.add(0, large, {0, 1}, NOBODY)
    assert isinstance(answer, Failed) and rank == 0 and str(MAX_GATHER) in answer.message
    ranks = set(range(17))
    for rank in ranks - {16}:
        assert gathers.add(rank, Gather(rank, "u", 1, b"x" * MAX_GATHER), ranks, NOBODY) == []
    letters = gathers.add(16, Gather(16, "u", 1, b""), ranks, NOBODY)
    assert len(letters) == 17 and all(isinstance(letter, Failed) for _, letter in letters)


@given(st.permutations([(r, t) for r in range(3) for t in (1, 2)]), st.data())
def test_any_arrival_order_with_repeats_gives_each_rank_the_same(
    order: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Within a rank turns come in order; between ranks, and for repeats, anything goes."""
    gathers = Gathers()
    got: dict[tuple[int, int], dict[int, bytes]] = {}
    turns = {0: 1, 1: 1, 2: 1}

    def send(rank: int) -> None:
        letters = gathers.add(rank, value(rank, turns[rank]), {0, 1, 2}, NOBODY)
        for to, letter in letters:
            assert isinstance(letter, Gathered)
            turn = letter.req // 10
            assert got.setdefault((to, turn), letter.values) == letter.values

    for rank, _ in order:
        for _ in range(data.draw(st.integers(1, 3))):
            send(rank)
        if (rank, 1) in got and turns[rank] == 1:
            turns[rank] = 2
    for rank in (0, 1, 2, 0, 1, 2):
        turns[rank] = 2 if (rank, 1) in got else 1
        send(rank)
    for rank in range(3):
        assert got[rank, 1] == {r: b"v%d.1" % r for r in range(3)}


def test_joins_name_the_last_to_join() -> None:
    joins = Joins()
    joins.add(2, 7)
    assert joins.settle({0, 1}) == []
    joins.add(0, 8)
    joins.add(2, 7)
    assert joins.settle({1}) == []
    joins.add(1, 9)
    last = {1: b"last"}
    assert joins.settle(NOBODY) == [
        (2, Gathered(7, last)),
        (0, Gathered(8, last)),
        (1, Gathered(9, last)),
    ]


def test_c44_those_who_wait_are_told_for_whom_and_again_after_the_same_time() -> None:
    gathers = Gathers()
    gathers.add(2, value(2, 1), {0, 1, 2}, NOBODY)
    assert gathers.stalled({0, 1, 2}, 100.0, 5.0) == []
    assert gathers.stalled({0, 1, 2}, 104.9, 5.0) == []
    text = f"gather {value(2, 1).tag!r} waits for ranks 0-1"
    assert gathers.stalled({0, 1, 2}, 105.0, 5.0) == [([2], text)]
    gathers.add(0, value(0, 1), {0, 1, 2}, NOBODY)
    assert gathers.stalled({0, 1, 2}, 109.9, 5.0) == []
    assert gathers.stalled({0, 1, 2}, 110.0, 5.0) == [([0, 2], text.replace("ranks 0-1", "rank 1"))]
    gathers.add(1, value(1, 1), {0, 1, 2}, NOBODY)
    assert gathers.stalled({0, 1, 2}, 999.0, 5.0) == []
