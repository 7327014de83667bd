"""E1: where training threads stop, however many they are."""

from __future__ import annotations

from gradsum.proto.control import Fence
from gradsum.worker.fence import Gate


def gate_at(step: int) -> Gate:
    """A gate after so many steps."""
    gate = Gate()
    for _ in range(step):
        assert not gate.arrive()
    return gate


def test_a_fence_is_accepted_only_while_its_step_lies_ahead() -> None:
    gate = gate_at(3)
    assert gate.announce(Fence(1, 1, 3)) == (False, False)
    assert gate.announce(Fence(2, 1, 5)) == (True, False)
    assert not gate.arrive()
    assert gate.arrive()
    assert gate.waiting


def test_go_releases_those_who_stand_there_and_nobody_later() -> None:
    gate = gate_at(0)
    gate.announce(Fence(1, 1, 1))
    assert gate.arrive()
    assert not gate.open(0), "of an older fence"
    assert gate.open(1)
    assert not gate.open(1), "said again"
    assert not gate.arrive()


def test_a_later_fence_replaces_the_one_where_a_thread_stands() -> None:
    gate = gate_at(0)
    gate.announce(Fence(1, 1, 1))
    assert gate.arrive()
    assert gate.announce(Fence(2, 1, 4)) == (True, True)
    assert not gate.waiting
    assert gate.announce(Fence(1, 1, 9)) == (False, False), "an old one"


def test_a_second_thread_stops_at_the_fence_where_the_first_stands() -> None:
    gate = gate_at(0)
    gate.announce(Fence(1, 1, 1))
    assert gate.arrive()
    assert gate.arrive(), "the second thread"
    assert gate.waiting
    assert gate.step == 1, "the rank stands at F until it is released"
    assert gate.open(1)
    assert gate.step == 2


def test_steps_of_other_threads_count_when_a_later_fence_releases_them() -> None:
    gate = gate_at(0)
    gate.announce(Fence(1, 1, 1))
    gate.arrive()
    gate.arrive()
    assert gate.announce(Fence(2, 1, 2)) == (False, True), "step 2 was reached meanwhile"
    assert gate.step == 2
