"""TransferQueue: the most urgent with credit goes; credit is exceeded by one frame at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gradsum.scheduler.credit import NEWS, Inflow
from gradsum.scheduler.queue import PATIENCE, STALLED, TransferQueue


def anything(lane: int, item: Any) -> bool:
    return True


def queue(
    *windows: int, wanted: Callable[[int, Any], bool] = anything
) -> TransferQueue[Any]:
    """Open lanes 0, 1, ... with these windows."""
    result: TransferQueue[Any] = TransferQueue(wanted)
    for lane, window in enumerate(windows):
        result.open(lane, 1, window)
    return result


def drain(one: TransferQueue[Any]) -> list[Any]:
    """Items in the order in which they leave."""
    items = []
    while (departure := one.pop()) is not None:
        items.append(departure.item)
    return items


def test_lower_numbers_first_ties_by_arrival_over_all_lanes() -> None:
    one = queue(10_000, 10_000)
    for lane, priority, item in [(0, 5, "a"), (1, 3, "b"), (0, 3, "c"), (1, 9, "d"), (0, -1, "e")]:
        one.push(lane, priority, 100, item)
    assert drain(one) == ["e", "b", "c", "a", "d"]


def test_a_lane_without_credit_does_not_hold_up_the_others() -> None:
    one = queue(0, 10_000)
    one.push(0, 1, 100, "urgent")
    one.push(1, 9, 100, "not urgent")
    assert drain(one) == ["not urgent"]


def test_f1_a_frame_may_exceed_the_window_by_itself_but_not_the_next_one() -> None:
    one = queue(10)
    one.push(0, 1, 1_000, "large")
    one.push(0, 1, 1, "small")
    assert drain(one) == ["large"]
    one.grant(0, 1, 1_000, 1_010, 1_010)
    assert drain(one) == ["small"]


def test_f1_departures_carry_absolute_offsets_and_numbers() -> None:
    one = queue(10_000)
    for size in (100, 50, 7):
        one.push(0, 0, size, size)
    found = [(d.offset, d.seq, d.generation) for d in (one.pop() for _ in range(3)) if d]
    assert found == [(100, 1, 1), (150, 2, 1), (157, 3, 1)]


def test_f1_what_nobody_wants_any_more_takes_no_credit() -> None:
    wanted = {"a": True, "b": False, "c": True}
    one = queue(250, wanted=lambda lane, item: wanted[item])
    for item in "abc":
        one.push(0, 0, 200, item)
    assert drain(one) == ["a", "c"]
    assert one.pop() is None


def test_f1_between_hold_and_limit_only_what_is_more_urgent_than_all_in_flight() -> None:
    one = queue(100)
    one.push(0, 5, 100, "first")
    assert drain(one) == ["first"]
    one.grant(0, 1, 0, 100, 1_000)
    one.push(0, 5, 100, "as urgent")
    assert drain(one) == []
    one.push(0, 4, 100, "more urgent")
    assert drain(one) == ["more urgent"]
    one.grant(0, 1, 200, 200, 1_000)  # both have arrived
    assert drain(one) == ["as urgent"]


def test_f1_grants_of_another_generation_or_going_back_say_nothing() -> None:
    one = queue(0)
    one.push(0, 0, 10, "x")
    one.grant(0, 2, 0, 500, 500)
    one.grant(7, 1, 0, 500, 500)
    assert drain(one) == []
    one.grant(0, 1, 0, 500, 500)
    assert drain(one) == ["x"]
    one.grant(0, 1, 0, 5, 5)
    one.push(0, 0, 10, "y")
    assert drain(one) == ["y"]


def test_f1_a_window_may_shrink_with_progress_and_never_holds_a_sender_for_good() -> None:
    one = queue(1_000)
    for number in range(4):
        one.push(0, number, 400, f"{number}")
    assert drain(one) == ["0", "1", "2"]
    one.grant(0, 1, 800, 900, 900)  # a smaller window: 1,200 have been sent already
    assert drain(one) == []
    one.grant(0, 1, 1_200, 1_201, 1_300)
    assert drain(one) == ["3"]
    held = queue(1_000)
    held.grant(0, 1, 0, 100, 1_000)
    for number in range(3):
        held.push(0, 0, 100, f"{number}")
    assert drain(held) == ["0"]
    held.grant(0, 1, 0, 200, 200)  # the hold ends, in a smaller window, before anything arrived
    assert drain(held) == ["1"]
    held.grant(0, 1, 0, 50, 200)  # an older one
    assert held.pop() is None


def test_a_new_connection_starts_at_zero_and_keeps_what_waits() -> None:
    one = queue(100)
    one.push(0, 0, 100, "sent")
    one.push(0, 0, 100, "waits")
    assert drain(one) == ["sent"]
    one.open(0, 2, 100)
    departure = one.pop()
    assert departure is not None
    assert (departure.item, departure.offset, departure.seq) == ("waits", 100, 1)
    assert departure.generation == one.generation(0) == 2


def test_f3_a_stalled_lane_sends_one_frame_beyond_its_grant_and_waits_longer_each_time() -> None:
    one = queue(100)
    for item in range(8):
        one.push(0, 0, 100, item)
    assert drain(one) == [0]  # and it is lost, or its grant
    left, now = [], 10.0
    while now < 40.0:
        left += [(d.item, now - 10.0) for d in one.overdue(now)]
        now += STALLED / 4
    waits = [b - a for (_, a), (_, b) in zip(left, left[1:], strict=False)]
    assert left[0] == (1, STALLED)
    assert waits == sorted(waits)
    assert waits[-1] <= PATIENCE + STALLED / 2
    one.grant(0, 1, 300, 300, 300)  # something has arrived: soon again
    one.overdue(50.0)
    assert one.overdue(50.0 + STALLED)


def test_f3_news_of_the_receiver_is_no_stall() -> None:
    one = queue(100)
    one.push(0, 0, 300, "a")
    one.push(0, 0, 100, "b")
    drain(one)
    for second in range(5):
        one.grant(0, 1, 20 * second, 20 * second + 100, 20 * second + 100)
        assert one.overdue(float(second)) == []


def test_nothing_leaves_before_a_lane_is_open() -> None:
    one: TransferQueue[str] = TransferQueue(anything)
    one.expect(3)
    one.push(3, 0, 10, "x")
    assert one.pop() is None
    assert [one.overdue(t) for t in (0.0, 10.0, 20.0)] == [[], [], []]
    one.open(3, 1, 100)
    assert drain(one) == ["x"]
    assert 3 in one and 4 not in one


def test_clear_forgets_what_waits_and_keeps_connections() -> None:
    one = queue(1_000, 0)
    one.push(0, 0, 10, "a")
    one.push(1, 0, 10, "b")
    one.clear()
    assert one.waiting(0) == one.waiting(1) == 0
    one.grant(1, 1, 0, 100, 100)
    assert drain(one) == []
    with pytest.raises(KeyError):
        one.push(9, 0, 10, "never opened")


class Senders(RuleBasedStateMachine):
    """Any order of pushes, grants and departures against the receivers' true state."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 500
        self.queue = queue(*[self.window] * 3)
        self.sent = [0, 0, 0]
        self.seen = [0, 0, 0]
        self.waiting: dict[int, tuple[int, int]] = {}  # item -> lane, size
        self.count = 0
        self.now = 0.0

    @rule(lane=st.integers(0, 2), priority=st.integers(0, 3), size=st.integers(1, 300))
    def push(self, lane: int, priority: int, size: int) -> None:
        self.count += 1
        self.waiting[self.count] = (lane, size)
        self.queue.push(lane, priority, size, self.count)

    @rule()
    def pop(self) -> None:
        departure = self.queue.pop()
        if departure is None:
            for lane, _ in self.waiting.values():  # nobody with credit waits
                assert self.sent[lane] >= self.seen[lane] + self.window
            return
        lane, size = self.waiting.pop(departure.item)
        assert lane == departure.lane
        assert self.sent[lane] < self.seen[lane] + self.window  # exceeded by one frame at most
        self.sent[lane] += size
        assert departure.offset == self.sent[lane]

    @precondition(lambda self: self.sent != self.seen)
    @rule(lane=st.integers(0, 2), share=st.floats(0, 1))
    def arrive(self, lane: int, share: float) -> None:
        self.seen[lane] += int((self.sent[lane] - self.seen[lane]) * share)
        end = self.seen[lane] + self.window
        self.queue.grant(lane, 1, self.seen[lane], end, end)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert sum(self.queue.waiting(lane) for lane in range(3)) == len(self.waiting)


Senders.TestCase.settings = hypothesis_settings(
    max_examples=60, deadline=None, stateful_step_count=40
)
TestSenders = Senders.TestCase


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 100)), max_size=40))
def test_with_credit_everything_leaves_by_urgency(pushes: list[tuple[int, int, int]]) -> None:
    one = queue(1 << 30, 1 << 30, 1 << 30)
    for number, (lane, priority, size) in enumerate(pushes):
        one.push(lane, priority, size, (priority, number))
    left = drain(one)
    assert left == sorted(left)
    assert len(left) == len(pushes)


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=60),
    window=st.integers(1, 3_000), bound=st.one_of(st.none(), st.integers(0, 2_000)),
    shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4),
)  # fmt: skip
def test_a_bound_never_stops_a_lane_whose_receiver_reports_parts_only(
    sizes: list[int], window: int, bound: int | None, shares: list[float]
) -> None:
    """What has arrived is reported when Inflow calls it news, and at no other time."""
    one: TransferQueue[int] = TransferQueue(lambda lane, item: True, NEWS)
    inflows = [Inflow(1, window) for _ in shares]
    for lane, (share, inflow) in enumerate(zip(shares, inflows, strict=True)):
        one.open(lane, 1, 0)
        one.share(lane, share)
        inflow.told = inflow.grant()
        one.grant(lane, *inflow.told)
    for number, size in enumerate(sizes):
        one.push(number % len(shares), 0, size, number)
    one.bound = bound
    left = 0
    while left < len(sizes):
        before = left
        while (departure := one.pop()) is not None:
            left += 1
            inflows[departure.lane].arrived(departure.offset, 0.0)
        for lane, inflow in enumerate(inflows):
            grant = inflow.grant()
            if inflow.news(grant):
                inflow.told = grant
                one.grant(lane, *grant)
        assert left > before, f"{left} of {len(sizes)} have left"


def test_lanes_under_a_bound_carry_by_their_shares() -> None:
    one = queue(10**9, 10**9)
    one.bound = 1_000
    one.share(0, 3.0)
    one.share(1, 1.0)
    for number in range(100):
        one.push(number % 2, number, 100, f"{number}")
    drain(one)
    assert [one._lanes[lane].sent for lane in (0, 1)] == [800, 300]
    one.received(0, 4)
    assert one.under_way == 700
    drain(one)
    assert [one._lanes[lane].sent for lane in (0, 1)] == [1_200, 300]
