"""Timers: one deadline for each target; what was armed before is void."""

from __future__ import annotations

from gradsum.scheduler.policy import Policy
from gradsum.scheduler.slicing import Member, Slice, Unit
from gradsum.worker.rounds import Flight, Op, Stream, UnitRound
from gradsum.worker.timers import Timers


def stream() -> Stream:
    one = Slice(0, 0, 4, 0)
    return Stream(Unit(0, (Member(0, 0, 4),), 4, "float32", Policy(), (one,)), 0)


def flight() -> Flight:
    op = Op(0, "t", 1, memoryview(bytearray(4)), None, 0)
    return UnitRound(stream(), 1, (op,), True).flights[0]


def test_targets_come_in_the_order_of_their_deadlines() -> None:
    timers, a, b, c = Timers(), flight(), flight(), stream()
    timers.arm(a, 10.0, 3.0)
    timers.arm(b, 10.0, 1.0)
    timers.arm(c, 10.0, 2.0)
    assert timers.next() == 11.0
    assert list(timers.due(12.5)) == [b, c]
    assert timers.next() == 13.0
    assert (a.rto, a.due, c.ack_rto, c.ack_due) == (3.0, 13.0, 2.0, 12.0)


def test_arming_again_voids_the_earlier_deadline() -> None:
    timers, a = Timers(), flight()
    timers.arm(a, 10.0, 1.0)
    timers.arm(a, 10.0, 5.0)
    assert list(timers.due(12.0)) == []
    assert timers.next() == 15.0


def test_hastening_keeps_the_interval() -> None:
    timers, a = Timers(), flight()
    timers.arm(a, 10.0, 5.0)
    timers.hasten(a, 11.0)
    assert (timers.next(), a.rto) == (11.0, 5.0)
    assert list(timers.due(20.0)) == [a]


def test_a_target_without_deadline_is_never_due() -> None:
    timers, a = Timers(), flight()
    timers.arm(a, 10.0, 1.0)
    a.due = float("inf")
    assert timers.next() == float("inf")
    assert list(timers.due(99.0)) == []


def test_targets_may_be_armed_while_others_are_due() -> None:
    timers, a = Timers(), flight()
    timers.arm(a, 10.0, 1.0)
    seen = 0
    for target in timers.due(12.0):
        seen += 1
        if seen < 3:
            timers.arm(target, 10.0, 1.5)
    assert seen == 3
    timers.arm(a, 10.0, 1.0)
    timers.clear()
    assert timers.next() == float("inf")
