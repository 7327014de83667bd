"""Windows: when a tensor is pushed, declared absent, and counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradsum.worker.window import Window


def opened(size: int, needs: dict[int, int] | None = None, passes: int = 1) -> Window:
    window = Window(passes)
    window.grow(size)
    if needs is not None:
        for index, count in needs.items():
            for _ in range(count):
                window.fire(index)
        window.close(window.unsent())
        window.learn(needs)
    return window


def test_window_one_pushes_only_at_its_end_and_teaches() -> None:
    window = opened(3)
    assert not window.fire(2) and not window.fire(0) and not window.fire(0)
    lesson = window.lesson()
    assert lesson is not None
    assert lesson.counts == {2: 1, 0: 2} and lesson.order == [2, 0]
    assert window.close(window.unsent()) == (1, [2, 0], [1])
    assert window.lesson() is None and window.version == 2


def test_v4_a_push_leaves_at_the_last_learnt_firing() -> None:
    window = opened(2, {0: 2, 1: 1})
    assert window.fire(1) and not window.fire(0) and window.fire(0)
    window.sent(0)
    window.sent(1)
    assert window.is_sent(0) and window.is_sent(1)
    assert window.close(window.unsent()) == (2, [], [])
    assert not window.is_sent(0)


def test_v4_fewer_firings_push_at_close() -> None:
    window = opened(1, {0: 2})
    assert not window.fire(0)
    assert window.close(window.unsent()) == (2, [0], [])


def test_more_promised_passes_than_learnt_are_waited_for() -> None:
    window = opened(1, {0: 1}, passes=3)
    assert [window.fire(0) for _ in range(3)] == [False, False, True]


def test_nothing_is_early_until_all_ranks_are_heard() -> None:
    window = opened(1)
    window.fire(0)
    window.close(window.unsent())
    assert window.untaught
    assert not window.fire(0)
    window.learn({0: 1})
    assert not window.untaught


def test_what_never_fired_in_window_one_waits_for_the_end() -> None:
    window = opened(2, {0: 1})
    assert not window.fire(1)
    assert window.close(window.unsent()) == (2, [1], [0])


def test_c64_held_firings_mark_the_window_but_do_not_count() -> None:
    window = opened(1, {0: 1})
    assert not window.fire(0, held=True) and not window.fire(0, held=True)
    assert window.touched and window.fire(0)


def test_v1_a_fired_hook_ends_the_pause_after_synchronize() -> None:
    window = opened(1)
    window.fire(0)
    window.close(window.unsent())
    assert window.synchronized and not window.touched
    window.fire(0)
    assert not window.synchronized and window.touched


def test_a_discarded_window_declares_absent_what_did_not_leave() -> None:
    window = opened(3, {0: 1, 1: 2})
    assert window.fire(0)
    window.sent(0)
    window.fire(1)
    assert window.close([]) == (2, [], [1, 2])


def test_by_hand_comes_after_what_fired_and_never_twice() -> None:
    window = opened(4)
    window.fire(3)
    assert window.unsent({0, 3, 1}) == [3, 0, 1]


def test_relearning_counts_the_next_window() -> None:
    window = opened(1, {0: 1})
    window.relearn(2)
    assert [window.fire(0), window.fire(0)] == [False, False]
    window.close(window.unsent())
    assert [window.fire(0), window.fire(0)] == [False, True]


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=12), max_size=6),
    st.dictionaries(st.integers(0, 4), st.integers(0, 3)),
)
def test_each_tensor_is_pushed_or_absent_once_per_window(
    windows: list[list[int]], needs: dict[int, int]
) -> None:
    window = opened(5, needs)
    for number, firings in enumerate(windows, start=2):
        early = []
        for index in firings:
            if window.is_sent(index):
                continue  # the guard raises
            if window.fire(index):
                window.sent(index)
                early.append(index)
        verdict = window.close(window.unsent())
        assert verdict.version == number
        assert sorted(early + verdict.push + verdict.absent) == [0, 1, 2, 3, 4]
        assert set(early + verdict.push) == set(firings)
