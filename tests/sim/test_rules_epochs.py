"""Rules E1, E3, E7, E8, one scenario each: fences, departures, joins, packing."""

from __future__ import annotations

from typing import Any

from gradsum.errors import PeerLost
from gradsum.proto import peer
from gradsum.scheduler.policy import Policy
from gradsum.server import engine as serving
from gradsum.worker import core as working
from tests.sim.build import OneServer, OneWorker, array, plan, spec, values

BROADCAST = Policy("broadcast", 0)
PACK = Policy(pack="opt0")


def test_e1_a_paused_worker_opens_no_round_until_the_plan_comes() -> None:
    worker = OneWorker()
    worker.step(working.Pause())
    worker.submit(1, array(1, 1, 1, 1))
    assert not worker.sent
    assert worker.core.submitted() == {}, "held back, so not to be counted on by others"
    worker.step(working.Adopt(plan(epoch=2)))
    assert [s.header.epoch for s in worker.sent] == [2]


def test_e1_an_aborted_fence_goes_on_under_the_old_plan() -> None:
    worker = OneWorker()
    worker.step(working.Pause())
    worker.submit(1, array(1, 1, 1, 1))
    worker.step(working.Resume())
    assert [s.header.epoch for s in worker.sent] == [1]


def test_e1_clocks_start_at_the_versions_of_the_fence() -> None:
    versions = ((0, 7),)
    server, worker = OneServer(), OneWorker()
    server.step(serving.Adopt(plan(epoch=2, versions=versions), 0))
    worker.step(working.Adopt(plan(epoch=2, versions=versions)))
    server.push(0, 7, array(1, 1, 1, 1))
    assert server.heard(0, peer.Stable) == [peer.Stable(0, 0, 7)]
    server.push(0, 8, array(1, 1, 1, 1))
    server.push(1, 8, array(1, 1, 1, 1))
    assert [s.header.version for s in server.sums] == [8, 8]
    worker.submit(8, array(1, 1, 1, 1))
    assert worker.sent[0].header.version == 8


def test_e1_a_sum_of_the_old_plan_never_leaves_under_the_new_one() -> None:
    specs = (spec("a", 2, policy=PACK), spec("b", 2, policy=PACK))
    server = OneServer(*specs)
    server.attach(0, generation=2, window=0)
    server.push(0, 1, array(1, 1), key=1, generation=2)
    server.push(1, 1, array(1, 1), key=1)
    assert [s.rank for s in server.sums] == [1]  # the other waits for credit
    packing: dict[str, Any] = {"pack_bytes": 64, "packing": (0, 1), "packed": 2}
    server.step(serving.Adopt(plan(epoch=2, versions=((0, 1), (1, 1)), **packing), 0))
    server.say(0, peer.Credit(2, 0, 10_000, 10_000))
    assert [s.rank for s in server.sums] == [1]


def test_e1_a_worker_that_hears_of_a_newer_epoch_asks_for_the_plan() -> None:
    worker = OneWorker()
    worker.submit(1, array(1, 1, 1, 1))
    worker.tell(0, peer.Nack(0, 0, 1, "epoch", 2), epoch=2)
    assert worker.other == [working.FetchPlan(1)]
    assert not worker.failed


def test_e3_a_round_that_misses_a_rank_that_left_fails_and_names_it() -> None:
    worker = OneWorker(workers=3)
    op = worker.submit(1, array(1, 1, 1, 1))
    worker.receipt(worker.sent[0])
    worker.step(working.Departed(frozenset({2})))
    worker.tick(0.2)
    assert worker.heard(peer.Pull)
    worker.tell(0, peer.Open(0, 0, 1, (1,)))
    assert not worker.failed
    worker.tell(0, peer.Open(0, 0, 1, (1, 2)))
    assert [f.op for f in worker.failed] == [op]
    assert isinstance(worker.failed[0].error, PeerLost)
    assert "rank 2" in str(worker.failed[0].error)


def test_e7_rounds_go_on_without_a_rank_that_has_joined_but_it_stays_in_the_divisor() -> None:
    server = OneServer(workers=3)
    for rank in (0, 1):
        server.push(rank, 1, array(1, 1, 1, 1))
    server.say(2, peer.Standing())
    server.say(2, peer.Standing())
    assert len(server.heard(2, peer.StandingSeen)) == 2
    assert sorted(s.rank for s in server.sums) == [0, 1]
    assert server.sums[0].header.members == 3
    server.push(0, 2, array(1, 1, 1, 1))
    server.push(1, 2, array(1, 1, 1, 1))
    assert [s.header.version for s in server.sums] == [1, 1, 2, 2]


def test_e7_who_joins_with_a_sum_owed_owes_no_acknowledgement() -> None:
    server = OneServer()
    for rank in (0, 1):
        server.push(rank, 1, array(1, 1, 1, 1))
    server.say(0, peer.Ack(0, 0, 1))
    server.say(1, peer.Standing())
    assert server.heard(0, peer.Stable) == [peer.Stable(0, 0, 1)]


def test_e7_a_joined_rank_still_reads_broadcasts() -> None:
    server = OneServer(spec(policy=BROADCAST), workers=3)
    server.say(2, peer.Standing())
    server.push(0, 1, array(1, 1, 1, 1))
    assert sorted(s.rank for s in server.sums) == [1, 2]


def test_e7_standing_is_repeated_until_seen_by_every_server_and_again_after_a_new_plan() -> None:
    worker = OneWorker(servers=2)
    worker.step(working.Join())
    worker.tick(1.6)
    assert min(len(worker.heard(peer.Standing, s)) for s in (0, 1)) >= 2
    worker.tell(0, peer.StandingSeen())
    assert not worker.core.links.joined_everywhere()
    worker.tell(1, peer.StandingSeen())
    assert worker.core.links.joined_everywhere()
    worker.step(working.Adopt(plan(servers=2, epoch=2)))
    assert not worker.core.links.joined_everywhere()
    worker.clear()
    worker.tick(1.0)
    assert worker.heard(peer.Standing, 0) and worker.heard(peer.Standing, 1)


def test_e8_a_plan_waits_for_the_table_that_its_packing_needs() -> None:
    packing: dict[str, Any] = {"pack_bytes": 64, "packing": (1, 0), "packed": 2}
    server, worker = OneServer(spec("a", 2, policy=PACK)), OneWorker(spec("a", 2, policy=PACK))
    later = plan(epoch=2, **packing)
    server.step(serving.Adopt(later, 0))
    worker.step(working.Pause())
    worker.step(working.Adopt(later))
    assert server.fetched == 1
    assert worker.other == [working.FetchPlan(1)]
    worker.step(working.Adopt(plan()))  # a stale answer must not open rounds meanwhile
    worker.submit(1, array(1, 1), key=0)
    assert not worker.sent
    more = (spec("b", 2, policy=PACK),)
    server.step(serving.Extend(1, more))
    worker.step(working.Extend(1, more))
    worker.submit(1, array(2, 2), key=1)
    assert [(s.header.key, s.header.length) for s in worker.sent] == [(1, 16)]
    for rank in (0, 1):
        server.push(rank, 1, array(1, 1, 2, 2), key=1, mask=b"\x03")
    assert values(server.sums[0].payload) == [2, 2, 4, 4]


def test_e8_a_packed_buffer_leaves_when_its_last_tensor_is_handed_over() -> None:
    specs = (spec("a", 2, policy=PACK), spec("b", 2, policy=PACK))
    worker = OneWorker(*specs, pack_bytes=64, packing=(0, 1), packed=2)
    worker.submit(1, array(1, 1), key=1, priority=9)
    assert not worker.sent
    worker.submit(1, array(2, 2), key=0, priority=4)
    header = worker.sent[0].header
    assert (header.key, header.length, header.priority, header.mask) == (0, 16, 4, b"\x03")
    assert values(worker.sent[0].payload) == [2, 2, 1, 1]
