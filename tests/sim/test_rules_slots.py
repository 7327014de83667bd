"""Rules S1-S7, one scenario each: an Engine or a Core with hand-made messages."""

from __future__ import annotations

import pytest

from gradsum.errors import NotBuilt
from gradsum.proto import peer
from gradsum.scheduler.policy import Policy, require_built
from gradsum.server import engine as serving
from gradsum.worker.transfers import PULL_FIRST
from tests.sim.build import OneServer, OneWorker, array, plan, spec, values

BROADCAST = Policy("broadcast", 0)


def test_s1_an_older_epoch_is_refused_with_the_epoch_to_adopt() -> None:
    server = OneServer(epoch=3)
    server.push(0, 1, array(1, 2, 3, 4), epoch=2)
    assert server.heard(0, peer.Nack) == [peer.Nack(0, 0, 1, "epoch", 3)]
    assert not server.heard(0, peer.Receipt)


def test_s1_a_newer_epoch_is_parked_without_receipt_and_taken_up_with_the_plan() -> None:
    server = OneServer()
    server.push(0, 1, array(1, 2, 3, 4), epoch=2)
    assert server.fetched == 1
    assert not server.heard(0, peer.Receipt)
    server.step(serving.Adopt(plan(epoch=2), 0))
    assert [r.version for r in server.heard(0, peer.Receipt)] == [1]


def test_s1_an_unknown_key_is_parked_until_the_table_has_it() -> None:
    server = OneServer()
    server.push(0, 1, array(1, 2), key=1)
    assert server.fetched == 1
    server.step(serving.Extend(1, (spec("late", 2),)))
    server.push(1, 1, array(10, 20), key=1)
    assert [values(s.payload) for s in server.sums] == [[11, 22]] * 2


def test_s1_early_frames_beyond_the_park_budget_are_dropped_without_receipt() -> None:
    server = OneServer(park=300)
    for version in (1, 2, 3):
        server.push(0, version, array(1, 2, 3, 4), epoch=2)
    server.step(serving.Adopt(plan(epoch=2), 0))
    assert [r.version for r in server.heard(0, peer.Receipt)] == [1]


def test_s1_a_gap_is_refused() -> None:
    server = OneServer()
    server.push(0, 2, array(1, 2, 3, 4))
    assert server.heard(0, peer.Nack) == [peer.Nack(0, 0, 2, "gap", 1)]


def test_s1_a_duplicate_has_its_receipt_again_and_counts_once() -> None:
    server = OneServer()
    for _ in range(3):
        server.push(0, 1, array(1, 1, 1, 1))
    assert len(server.heard(0, peer.Receipt)) == 3
    server.push(1, 1, array(4, 4, 4, 4))
    server.push(1, 1, array(4, 4, 4, 4))
    assert values(server.sums[0].payload) == [5, 5, 5, 5]


@pytest.mark.parametrize("writable", [True, False])
def test_s2_the_first_payload_is_adopted_only_where_the_memory_is_ours(writable: bool) -> None:
    server = OneServer()
    first = array(1, 2, 3, 4)
    server.push(0, 1, first if writable else bytes(first))
    server.push(1, 1, array(1, 1, 1, 1))
    assert values(server.sums[0].payload) == [2, 3, 4, 5]
    assert values(first) == ([2, 3, 4, 5] if writable else [1, 2, 3, 4])


def test_s3_a_complete_sum_does_not_change_with_the_next_round() -> None:
    server = OneServer()
    for rank in (0, 1):
        server.push(rank, 1, array(1, 1, 1, 1))
    kept = server.sums[0].payload
    server.push(0, 2, array(9, 9, 9, 9))
    server.push(1, 2, array(9, 9, 9, 9))
    assert values(kept) == [2, 2, 2, 2]
    assert values(server.sums[-1].payload) == [18, 18, 18, 18]


def test_s4_the_next_push_acknowledges_and_the_sum_is_kept_for_the_others() -> None:
    server = OneServer()
    for rank in (0, 1):
        server.push(rank, 1, array(1, 1, 1, 1))
    server.push(0, 2, array(1, 1, 1, 1))
    server.clear()
    server.tick(3.0)
    server.say(1, peer.Pull(0, 0, 1))
    assert [(s.rank, s.header.version) for s in server.sums] == [(1, 1)]


def test_s4_stable_goes_out_when_nobody_is_owed_and_again_to_whoever_asks() -> None:
    server = OneServer()
    for rank in (0, 1):
        server.push(rank, 1, array(1, 1, 1, 1))
    server.say(0, peer.Ack(0, 0, 1))
    assert not server.heard(0, peer.Stable)
    server.say(1, peer.Ack(0, 0, 1))
    stable = peer.Stable(0, 0, 1)
    assert server.heard(0, peer.Stable) == server.heard(1, peer.Stable) == [stable]
    server.say(1, peer.Ack(0, 0, 1))
    server.say(0, peer.Pull(0, 0, 1))
    assert server.heard(0, peer.Stable) == server.heard(1, peer.Stable) == [stable, stable]


def test_s4_the_worker_repeats_its_acknowledgement_until_stable() -> None:
    worker = OneWorker()
    worker.submit(1, array(1, 1, 1, 1))
    worker.sum(1, array(2, 2, 2, 2))
    worker.tick(10.0)
    acks = len(worker.heard(peer.Ack))
    assert 5 <= acks <= 10
    assert not worker.core.settled()
    worker.tell(0, peer.Stable(0, 0, 1))
    assert worker.core.settled()
    worker.tick(10.0)
    assert len(worker.heard(peer.Ack)) == acks


def test_s4_the_root_waits_for_stable_before_its_next_broadcast() -> None:
    worker = OneWorker(spec(policy=BROADCAST))
    first = worker.submit(1, array(1, 1, 1, 1), sink=False)
    worker.submit(2, array(2, 2, 2, 2), sink=False)
    worker.receipt(worker.sent[0])
    assert worker.done == [first]
    worker.tick(5.0)
    assert [s.header.version for s in worker.sent] == [1]
    worker.tell(0, peer.Stable(0, 0, 1))
    assert [s.header.version for s in worker.sent] == [1, 2]


def test_s4_a_broadcast_is_not_overwritten_while_somebody_is_owed() -> None:
    server = OneServer(spec(policy=BROADCAST))
    server.push(0, 1, array(1, 1, 1, 1))
    server.push(0, 2, array(2, 2, 2, 2))
    assert [r.version for r in server.heard(0, peer.Receipt)] == [1]
    server.say(1, peer.Ack(0, 0, 1))
    assert server.heard(0, peer.Stable) == [peer.Stable(0, 0, 1)]
    server.push(0, 2, array(2, 2, 2, 2))
    assert [s.header.version for s in server.sums] == [1, 2]


def test_s5_a_pull_is_answered_by_what_the_slot_knows() -> None:
    server = OneServer(workers=3)
    server.say(0, peer.Pull(0, 0, 1))
    assert server.heard(0, peer.Open) == [peer.Open(0, 0, 1, ())]
    server.push(0, 1, array(1, 1, 1, 1))
    server.say(0, peer.Pull(0, 0, 1))
    assert server.heard(0, peer.Open)[-1] == peer.Open(0, 0, 1, (1, 2))
    server.say(0, peer.Pull(0, 0, 3))
    assert server.heard(0, peer.Nack) == [peer.Nack(0, 0, 3, "gap", 1)]


def test_s5_a_sum_just_sent_is_answered_queued_and_sent_again_when_it_must_be_lost() -> None:
    server = OneServer()
    for rank in (0, 1):
        server.push(rank, 1, array(1, 1, 1, 1))
    server.say(0, peer.Pull(0, 0, 1))
    assert server.heard(0, peer.Queued) == [peer.Queued(0, 0, 1)]
    assert len(server.sums) == 2
    server.tick(1.5)
    server.say(0, peer.Pull(0, 0, 1))
    assert [s.rank for s in server.sums] == [0, 1, 0]


def test_s5_a_sum_of_an_old_connection_is_sent_again_at_once() -> None:
    server = OneServer()
    for rank in (0, 1):
        server.push(rank, 1, array(1, 1, 1, 1))
    server.attach(0, generation=2)
    server.say(0, peer.Pull(0, 0, 1))
    assert [(s.rank, s.header.generation) for s in server.sums] == [(0, 1), (1, 1), (0, 2)]


def test_s5_an_open_that_lists_the_asker_restarts_its_push() -> None:
    worker = OneWorker()
    worker.submit(1, array(1, 1, 1, 1))
    worker.receipt(worker.sent[0])
    worker.tell(0, peer.Open(0, 0, 1, (1,)))
    assert len(worker.sent) == 1
    worker.tell(0, peer.Open(0, 0, 1, (0, 1)))
    assert len(worker.sent) == 2


def test_s5_pulls_double_to_two_seconds() -> None:
    worker = OneWorker()
    worker.submit(1, array(1, 1, 1, 1))
    worker.receipt(worker.sent[0])
    worker.tick(7 * PULL_FIRST + 0.01)
    assert len(worker.heard(peer.Pull)) == 3  # after once, thrice, seven times the first wait
    worker.tick(20.0)
    assert 12 <= len(worker.heard(peer.Pull)) <= 14
    assert len(worker.sent) == 1


def test_s6_ranks_are_added_in_order_and_a_parked_frame_counts_once() -> None:
    server = OneServer(workers=3, deterministic=True)
    big = 2.0**24
    server.push(2, 1, array(1, 0, 0, 0))
    server.push(2, 1, array(1, 0, 0, 0))
    server.push(1, 1, array(-big, 0, 0, 0))
    assert not server.sums
    server.push(0, 1, array(big, 0, 0, 0))
    assert values(server.sums[0].payload) == [1, 0, 0, 0]  # (big - big) + 1, exactly
    assert server.engine._parking.used == 0


def test_s6_beyond_the_budget_the_frame_is_dropped_and_asked_for_when_its_turn_comes() -> None:
    server = OneServer(workers=3, deterministic=True, park=16)
    server.push(1, 1, array(2, 2, 2, 2))
    server.push(2, 1, array(4, 4, 4, 4))
    assert [type(r) for r in server.told[2] if not isinstance(r, peer.Credit)] == [peer.Later]
    server.push(0, 1, array(1, 1, 1, 1))
    assert server.heard(2, peer.Resend) == [peer.Resend(0, 0, 1)]
    server.push(2, 1, array(4, 4, 4, 4))
    assert values(server.sums[0].payload) == [7, 7, 7, 7]


def test_s6_never_later_for_a_frame_whose_turn_has_come() -> None:
    server = OneServer(workers=3, deterministic=True, park=0)
    for rank in (0, 1, 2):
        server.push(rank, 1, array(1, 1, 1, 1))
    assert not any(server.heard(rank, peer.Later) for rank in range(3))
    assert len(server.sums) == 3


@pytest.mark.parametrize("asked", [True, False], ids=["on RESEND", "on its timer"])
def test_s6_the_worker_resends_after_later(asked: bool) -> None:
    worker = OneWorker(deterministic=True)
    worker.submit(1, array(1, 1, 1, 1))
    worker.tell(0, peer.Later(0, 0, 1, worker.sent[0].header.seq))
    if asked:
        worker.tell(0, peer.Resend(0, 0, 1))
    else:
        worker.tick(2.5)
    assert len(worker.sent) == 2


def test_s7_slack_is_refused_by_name_until_it_is_built() -> None:
    with pytest.raises(NotBuilt, match="slack=1 of tensor 'w'"):
        require_built(Policy(slack=1), "w")
