"""Slot: clocks, verdicts, parking, completion and who is still owed (S1, S3, S4, S6)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from gradsum.server.adder import Adder
from gradsum.server.slot import Parking, Slot, Verdict
from tests.sim.build import array, values

ADDER = Adder()


def slot(base: int = 0) -> Slot:
    return Slot(3, 1, "float32", base)


def give(
    one: Slot, rank: int, *payload: float, parking: Parking | None = None,
    order: tuple[int, ...] | None = None,
) -> Verdict:  # fmt: skip
    return one.contribute(
        rank, array(*payload) if payload else None, 0, ADDER, parking or Parking(1 << 20), order
    )


def test_s1_the_table_of_verdicts() -> None:
    one = slot(base=4)
    give(one, 0, 1.0)
    judged = {version: one.judge(0, version, True) for version in (3, 4, 5, 6)}
    assert judged == {
        3: Verdict.DUPLICATE, 4: Verdict.DUPLICATE, 5: Verdict.DUPLICATE, 6: Verdict.GAP
    }  # fmt: skip
    assert one.judge(1, 5, True) is Verdict.COUNTED
    assert one.judge(1, 6, True) is Verdict.GAP


def test_s4_a_broadcast_is_held_while_the_last_one_is_owed() -> None:
    one = slot()
    give(one, 0, 1.0)
    one.complete(1, (1, 2))
    assert one.judge(0, 2, False) is Verdict.HELD
    one.acknowledge(1, 1, True)
    assert one.judge(0, 2, False) is Verdict.HELD
    one.acknowledge(2, 1, True)
    assert one.judge(0, 2, False) is Verdict.COUNTED


def test_a_round_counts_each_rank_once_and_knows_who_is_missing() -> None:
    one = slot()
    assert one.missing((0, 1, 2)) == (0, 1, 2)
    give(one, 1, 2.0)
    give(one, 0)
    assert one.missing((0, 1, 2)) == (2,)
    give(one, 2, 5.0)
    done = one.complete(3, (0, 1, 2))
    assert values(done.payload) == [7.0]
    assert (done.version, done.present, done.members, done.nbytes) == (1, 2, 3, 4)
    assert (one.base, one.open) == (1, None)


def test_s4_the_last_acknowledgement_drops_the_round() -> None:
    one = slot()
    give(one, 0, 1.0)
    done = one.complete(1, (0, 1))
    assert one.acknowledge(0, 7, True) is None  # another version
    assert one.acknowledge(0, 1, True) is None
    assert one.acknowledge(0, 1, True) is None  # repeated
    assert one.acknowledge(1, 1, False) is done
    assert done.acked == {0}
    assert one.done is None
    assert one.acknowledge(1, 1, True) is None


def test_v5_a_round_of_absents_has_no_payload() -> None:
    one = slot()
    for rank in (0, 1):
        give(one, rank)
    done = one.complete(2, (0, 1))
    assert (done.payload, done.present, done.nbytes, done.exponent) == (None, 0, 0, 0)


def test_nothing_is_completed_that_nobody_opened() -> None:
    with pytest.raises(ValueError, match="no open round"):
        slot().complete(2, ())


def test_masks_are_merged() -> None:
    one = slot()
    for rank, mask in ((0, 0b0101), (1, 0b0110)):
        one.contribute(rank, array(1.0), mask, ADDER, Parking(100), None)
    assert one.complete(2, ()).mask == 0b0111


def test_s6_parked_frames_are_taken_up_in_rank_order() -> None:
    one, parking, order = slot(), Parking(100), (0, 1, 2, 3)
    assert give(one, 3, 8.0, parking=parking, order=order) is Verdict.PARKED
    assert give(one, 1, 2.0, parking=parking, order=order) is Verdict.PARKED
    assert parking.used == 8
    assert one.judge(1, 1, True) is Verdict.DUPLICATE
    assert one.missing(order) == (0, 2)
    assert give(one, 0, 1.0, parking=parking, order=order) is Verdict.COUNTED
    assert parking.used == 4
    assert give(one, 2, parking=parking, order=order) is Verdict.COUNTED  # ABSENT
    assert parking.used == 0
    assert values(one.complete(4, ()).payload) == [11.0]


def test_s6_the_budget_is_shared_and_later_ranks_are_asked_once() -> None:
    one, other, parking, order = slot(), slot(), Parking(8), (0, 1, 2)
    assert give(other, 2, 1.0, parking=parking, order=order) is Verdict.PARKED
    assert give(one, 1, 1.0, parking=parking, order=order) is Verdict.PARKED
    assert give(one, 2, 1.0, parking=parking, order=order) is Verdict.LATER
    assert one.due() == set()
    give(one, 0, 1.0, parking=parking, order=order)
    assert one.due() == {2}
    assert one.due() == set()
    assert give(one, 2, 1.0, parking=parking, order=order) is Verdict.COUNTED


def test_e7_a_standing_absence_opens_the_turn_of_those_behind() -> None:
    one, parking, order = slot(), Parking(100), (0, 1, 2)
    give(one, 2, 4.0, parking=parking, order=order)
    give(one, 0, 1.0, parking=parking, order=order)
    one.standing(1, ADDER, parking)
    assert one.missing(order) == ()
    assert values(one.complete(3, ()).payload) == [5.0]


class Clocks(RuleBasedStateMachine):
    """Any order of pushes, repeats and acknowledgements against a plain list of versions."""

    RANKS = (0, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.slot = slot()
        self.clock = dict.fromkeys(self.RANKS, 0)
        self.sums: dict[int, list[float]] = {}

    @rule(rank=st.sampled_from(RANKS), step=st.integers(-2, 2))
    def push(self, rank: int, step: int) -> None:
        version = self.clock[rank] + step
        if version < 1:
            return
        verdict = self.slot.judge(rank, version, True)
        open_version = min(self.clock.values()) + 1
        if version > open_version:
            assert verdict is Verdict.GAP
        elif version <= self.clock[rank]:
            assert verdict is Verdict.DUPLICATE
        else:
            assert verdict is Verdict.COUNTED
            assert give(self.slot, rank, 4.0**rank, float(version)) is Verdict.COUNTED
            self.slot.acknowledge(rank, version - 1, False)
            self.clock[rank] = version
        if not self.slot.missing(self.RANKS):
            assert self.slot.done is None  # all have acknowledged by their push
            self.sums[version] = values(self.slot.complete(3, self.RANKS).payload)
            assert self.sums[version] == [21.0, 3.0 * version]

    @rule(rank=st.sampled_from(RANKS))
    def acknowledge(self, rank: int) -> None:
        done = self.slot.done
        if done is not None:
            self.slot.acknowledge(rank, done.version, True)
            assert values(done.payload) == [21.0, 3.0 * done.version]  # S3


Clocks.TestCase.settings = settings(max_examples=60, deadline=None, stateful_step_count=40)
TestClocks = Clocks.TestCase
