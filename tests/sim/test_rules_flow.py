"""Rules F1-F6, one scenario each: credit, holds, lost windows, connections."""

from __future__ import annotations

import pytest

from gradsum.errors import ProtocolError
from gradsum.proto import peer
from gradsum.worker import core as working
from tests.sim.build import OneServer, OneWorker, array, spec, values


def test_f1_any_frame_returns_its_credit_whatever_its_fate() -> None:
    server = OneServer(window=1000)
    server.push(0, 1, array(1, 1, 1, 1))
    server.push(0, 1, array(1, 1, 1, 1))  # duplicate
    server.push(0, 9, array(1, 1, 1, 1))  # gap
    server.push(0, 1, array(1, 1, 1, 1), epoch=0)  # old
    with pytest.raises(ProtocolError):
        server.push(0, 1, array(1, 1))  # wrong length
    server.tick(0.6)
    assert server.heard(0, peer.Credit)[-1].limit == 4 * 272 + 264 + 1000


def test_f1_offsets_are_absolute_so_a_lost_frame_leaks_nothing() -> None:
    server = OneServer(window=1000)
    server._offsets[0] += 5_000  # sent, and lost on the way
    server.push(0, 1, array(1, 1, 1, 1))
    assert server.heard(0, peer.Credit)[-1].limit == 5_272 + 1000


def test_f1_a_frame_or_grant_of_an_old_connection_says_nothing() -> None:
    server = OneServer()
    server.attach(0, generation=2)
    server.push(0, 1, array(1, 1, 1, 1), generation=1)
    assert server.engine.counters["stale"] == 1
    worker = OneWorker(credit=0)
    worker.tell(0, peer.Credit(0, 0, 10_000, 10_000))
    worker.submit(1, array(1, 1, 1, 1))
    assert not worker.sent


def test_f1_a_more_urgent_slice_obeys_only_the_limit() -> None:
    worker = OneWorker(spec("a"), spec("b"), spec("c"), credit=0)
    worker.tell(0, peer.Credit(1, 0, 1, 10_000))
    worker.submit(1, array(1, 1, 1, 1), key=0, priority=5)
    worker.submit(1, array(1, 1, 1, 1), key=1, priority=6)
    assert [s.header.key for s in worker.sent] == [0]
    worker.submit(1, array(1, 1, 1, 1), key=2, priority=1)
    assert [s.header.key for s in worker.sent] == [0, 2]


def test_f1_grants_are_repeated_in_heartbeats() -> None:
    server, worker = OneServer(), OneWorker()
    for _ in range(4):
        server.tick(0.5)
    worker.tick(2.0)
    assert len(server.heard(0, peer.Credit)) >= 4
    assert len(worker.heard(peer.Credit)) >= 4


def test_f2_who_runs_ahead_of_the_slowest_is_held_and_let_go_by_time() -> None:
    server = OneServer(spec("a", 100), spec("b", 100), window=1000, skew=100)
    payload = bytearray(400)
    server.push(1, 1, payload, key=0)
    server.push(0, 1, payload, key=0)
    server.push(0, 1, payload, key=1)
    held = server.heard(0, peer.Credit)[-1]
    assert held.hold == held.seen < held.limit
    for _ in range(3):
        server.tick(0.03)
    gone = server.heard(0, peer.Credit)[-1]
    assert gone.hold == gone.limit == held.limit


def test_f3_a_full_lane_where_nothing_moves_sends_one_frame_beyond_the_grant() -> None:
    worker = OneWorker(spec("a"), spec("b"), credit=272)
    worker.submit(1, array(1, 1, 1, 1), key=0)
    worker.submit(1, array(1, 1, 1, 1), key=1)
    assert [s.header.key for s in worker.sent] == [0]
    worker.tick(2.6)
    assert [s.header.offset for s in worker.sent] == [272, 544]


def test_f3_a_slow_link_is_not_filled_with_repeats() -> None:
    """Receipts take far longer than any timer: what is beyond the grant stays a few frames."""
    worker = OneWorker(*(spec(f"t{i}") for i in range(8)), credit=8 * 272)
    for key in range(8):
        worker.submit(1, array(1, 1, 1, 1), key=key)
    worker.tick(60.0)
    assert worker.core.counters["resends"] >= 8
    assert len(worker.sent) <= 8 + 10


def test_s5_sums_on_a_slow_link_are_not_repeated_while_others_arrive() -> None:
    keys = range(8)
    server = OneServer(*(spec(f"t{i}") for i in keys))
    for key in keys:
        for rank in (0, 1):
            server.push(rank, 1, array(1, 1, 1, 1), key=key)
    for arrived in keys:
        for _ in range(6):
            server.tick(0.15)
            server.say(0, *(peer.Pull(key, 0, 1) for key in keys if key > arrived))
        end = 272 * (arrived + 1)
        server.say(0, peer.Credit(1, end, end + 10_000, end + 10_000))
    assert len([s for s in server.sums if s.rank == 0]) == len(keys)


def test_f3_what_waits_behind_lost_frames_goes_on_too() -> None:
    """The window was lost on the way and nothing of it has a timer any more: a sum waits."""
    server = OneServer(spec("a"), spec("b"))
    server.attach(0, generation=2, window=272)
    for key in (0, 1):
        for rank in (0, 1):
            server.push(rank, 1, array(1, 1, 1, 1), key=key, generation=2 - rank)
    assert [s.header.key for s in server.sums if s.rank == 0] == [0]  # and it is lost
    for _ in range(4):
        server.tick(0.5)
    assert [s.header.key for s in server.sums if s.rank == 0] == [0, 1]


def test_f3_a_push_waits_no_longer_than_a_stall() -> None:
    worker = OneWorker(spec("a"), spec("b"), credit=272)
    worker.submit(1, array(1, 1, 1, 1), key=0)
    worker.submit(1, array(1, 1, 1, 1), key=1)
    worker.receipt(worker.sent[0])  # but its credit never comes
    worker.tick(2.5)
    assert 1 in [s.header.key for s in worker.sent]


def test_f3_a_gap_in_the_receipts_resends_after_the_floor() -> None:
    worker = OneWorker(*(spec(f"t{i}") for i in range(4)))
    for key in range(4):
        worker.submit(1, array(1, 1, 1, 1), key=key)
    worker.receipt(worker.sent[3])
    worker.tick(0.15)
    assert [s.header.key for s in worker.sent] == [0, 1, 2, 3, 0]


def test_f4_attach_leads_its_envelope_whatever_else_waits() -> None:
    worker = OneWorker()
    worker.step(working.Connected(0, 2, False))
    worker.clear()
    worker.now += 1.0
    worker.core.links.tell(0, peer.Pull(0, 0, 1))
    worker.step(working.Tick())
    assert isinstance(worker.said[0][0], peer.Attach)
    assert [a.generation for a in worker.other if isinstance(a, working.SendAttach)] == [2]


def test_f5_a_late_copy_of_an_old_round_changes_nothing() -> None:
    server = OneServer()
    for version in (1, 2):
        for rank in (0, 1):
            server.push(rank, version, array(version, 0, 0, 0))
    server.push(0, 3, array(3, 0, 0, 0))
    server.push(0, 1, array(1, 0, 0, 0))
    server.push(1, 3, array(3, 0, 0, 0))
    assert values(server.sums[-1].payload)[0] == 6


def test_f6_a_stranger_makes_a_new_connection_once_and_what_was_in_flight_goes_again() -> None:
    worker = OneWorker()
    worker.submit(1, array(1, 1, 1, 1))
    worker.tell(0, peer.Stranger())
    worker.tell(0, peer.Stranger())
    assert [type(a) for a in worker.other] == [working.Reconnect]
    worker.step(working.Connected(0, 2, False))
    assert len(worker.sent) == 1
    worker.tell(0, peer.Attached(2, False), peer.Credit(2, 0, 10_000, 10_000))
    assert [s.header.generation for s in worker.sent] == [1, 2]
    assert worker.sent[1].header.offset == 272
