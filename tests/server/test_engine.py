"""Engine: events in, actions and records out; what the rules' scenarios do not cover."""

from __future__ import annotations

from typing import Any

import pytest

from gradsum.errors import ProtocolError
from gradsum.proto import data, peer
from gradsum.scheduler.policy import Policy
from gradsum.server.engine import BATCH, Adopt, Attached, Extend, Frame, Records, Reset, Tick
from tests.sim.build import OneServer, array, plan, spec, values

PACK = Policy(pack="opt0")


def test_a_sum_goes_to_all_readers_with_everything_a_reader_checks() -> None:
    server = OneServer(workers=3)
    for rank in range(3):
        server.push(rank, 1, array(*[4.0**rank] * 4), priority=7 - rank)
    assert [s.rank for s in server.sums] == [0, 1, 2]
    for one in server.sums:
        h = one.header
        assert values(one.payload) == [21.0] * 4
        assert (h.kind, h.job, h.epoch, h.key, h.slice, h.version) == (data.SUM, "j", 1, 0, 0, 1)
        assert (h.rank, h.incarnation, h.server_incarnation) == (one.rank, 10 + one.rank, 100)
        assert (h.length, h.members, h.present, h.priority) == (16, 3, 3, 5)
        assert (h.generation, h.offset, h.seq) == (1, 16 + 256, 1)


def test_slices_are_summed_on_their_own() -> None:
    server = OneServer(spec(elements=600))
    for index, length in ((1, 1024), (0, 1024), (2, 352)):
        for rank in (0, 1):
            server.push(rank, 1, bytearray(length), index=index)
    assert [(s.header.slice, s.header.length) for s in server.sums[::2]] == [
        (1, 1024), (0, 1024), (2, 352)
    ]  # fmt: skip


def test_urgent_sums_overtake_those_that_wait_for_credit() -> None:
    server = OneServer(spec("a"), spec("b"), spec("c"))
    server.attach(0, generation=2, window=0)
    for key, priority in ((0, 5), (1, 1), (2, 3)):
        server.push(0, 1, array(1, 1, 1, 1), key=key, priority=priority, generation=2)
        server.push(1, 1, array(1, 1, 1, 1), key=key, priority=priority)
    server.say(0, peer.Credit(2, 0, 10_000, 10_000))
    assert [s.header.key for s in server.sums if s.rank == 0] == [1, 2, 0]


def test_a_reader_that_was_not_there_when_the_sum_left_asks_for_it() -> None:
    server = OneServer(spec(policy=Policy("broadcast", 0)))
    server.step(Reset())
    server.step(Extend(0, (spec(policy=Policy("broadcast", 0)),)))
    server.step(Adopt(plan(), 0))
    server.attach(0)
    server.push(0, 1, array(1, 1, 1, 1))
    assert not server.sums
    server.attach(1)
    server.say(1, peer.Pull(0, 0, 1))
    assert [s.rank for s in server.sums] == [1]


def test_counters_say_what_happened() -> None:
    server = OneServer()
    server.push(0, 1, array(1, 1, 1, 1))
    server.push(0, 1, array(1, 1, 1, 1))
    server.push(1, 1, array(1, 1, 1, 1))
    counters = server.engine.counters
    assert (counters["pushes"], counters["duplicates"], counters["sums"]) == (2, 1, 1)
    assert (counters["bytes_in"], counters["bytes_out"]) == (32, 32)
    assert server.engine.info() == counters | {"uplink": 0.0, "capacity": 0.0}


def test_heartbeats_ping_and_repeat_the_grant() -> None:
    server = OneServer()
    server.tick(0.6)
    assert [type(r) for r in server.told[0]] == [peer.Ping, peer.Credit]
    server.clear()
    server.tick(0.1)
    assert not server.told[0]
    assert server.engine.next_deadline(server.now) == pytest.approx(server.now + 0.4)


def test_an_envelope_has_room_for_so_many_records_and_the_rest_goes_at_once() -> None:
    server = OneServer()
    engine, now = server.engine, server.now
    asked = tuple(peer.Pull(key, 0, 1) for key in range(100, 100 + BATCH + 10))
    engine.step(Records(0, 1, asked), now)
    assert len(engine.drain(now)[0]) == BATCH
    assert engine.next_deadline(now) == now
    assert len(engine.drain(now)[0]) == 10
    assert engine.next_deadline(now) > now


def test_a_gap_in_the_table_is_asked_for() -> None:
    server = OneServer()
    server.step(Extend(5, (spec("later"),)))
    assert server.fetched == 1
    assert len(server.engine.table) == 1


def test_an_older_plan_changes_nothing() -> None:
    server = OneServer(epoch=3)
    server.push(0, 1, array(1, 1, 1, 1))
    server.step(Adopt(plan(epoch=2), 0))
    server.step(Adopt(plan(epoch=3), 0))
    server.push(1, 1, array(1, 1, 1, 1))
    assert len(server.sums) == 2


def test_one_bad_early_frame_does_not_lose_the_others() -> None:
    server = OneServer()
    server.push(0, 1, array(1, 1), epoch=2)  # wrong length
    server.push(1, 1, array(1, 1, 1, 1), epoch=2)
    server.step(Adopt(plan(epoch=2), 0))
    assert server.engine.counters["rejected"] == 1
    assert [r.version for r in server.heard(1, peer.Receipt)] == [1]
    assert isinstance(server.heard(0, peer.Nack)[0], peer.Nack)


def test_early_frames_keep_their_place_in_the_budget_over_plans() -> None:
    server = OneServer(park=600)
    server.push(0, 1, array(1, 1, 1, 1), epoch=3)
    server.push(1, 1, array(1, 1, 1, 1), epoch=3)
    assert server.engine._parking.used == 2 * 272
    server.step(Adopt(plan(epoch=2), 0))
    assert server.engine._parking.used == 2 * 272
    server.step(Adopt(plan(epoch=3), 0))
    assert server.engine._parking.used == 0
    assert len(server.sums) == 2


def test_an_attach_that_is_repeated_does_not_start_the_credit_anew() -> None:
    server = OneServer()
    server.push(0, 1, array(1, 1, 1, 1))
    server.step(Attached(0, 1, False))
    assert server.heard(0, peer.Attached)[-1] == peer.Attached(1, False)
    assert server.heard(0, peer.Credit)[-1].seen == 272


def test_packed_buffers_need_their_mask() -> None:
    packing: dict[str, Any] = {"pack_bytes": 64, "packing": (0, 1), "packed": 2}
    server = OneServer(spec("a", 2, policy=PACK), spec("b", 2, policy=PACK), **packing)
    with pytest.raises(ProtocolError, match="without its mask"):
        server.push(0, 1, array(1, 1, 1, 1))


def test_what_a_worker_may_not_send_is_refused() -> None:
    server = OneServer()
    with pytest.raises(ProtocolError, match="worker 0 sent Receipt"):
        server.say(0, peer.Receipt(0, 0, 1, 1))
    for rank in (0, 1):
        server.push(rank, 1, array(1, 1, 1, 1))
    echo = server.sums[0].header
    with pytest.raises(ProtocolError, match="worker 0 sent SUM"):
        server.step(Frame(0, echo, server.sums[0].payload))


def test_records_of_another_epoch_are_told_so_or_wait_for_the_plan() -> None:
    server = OneServer(epoch=2)
    server.say(0, peer.Pull(0, 0, 1), epoch=1)
    assert server.heard(0, peer.Nack) == [peer.Nack(0, 0, 1, "epoch", 2)]
    server.say(0, peer.Pull(0, 0, 1), epoch=3)
    assert server.fetched == 1


def test_a_pull_for_what_nobody_knows_is_open() -> None:
    server = OneServer()
    server.say(0, peer.Pull(77, 0, 1), peer.Pull(0, 9, 1))
    assert server.heard(0, peer.Open) == [peer.Open(77, 0, 1, ()), peer.Open(0, 9, 1, ())]


def test_reset_forgets_the_job() -> None:
    server = OneServer()
    server.push(0, 1, array(1, 1, 1, 1))
    server.step(Reset())
    assert (server.engine.plan, len(server.engine.table)) == (None, 0)
    server.clear()
    server.step(Tick())
    assert not any(server.told.values())


def test_half_sums_carry_their_exponent() -> None:
    server = OneServer(spec(wire="float16"), workers=3)
    for rank in range(3):
        server.push(rank, 1, array(49_152, 1, 2, 3, wire="float16"), wire="float16")
    h = server.sums[0].header
    assert h.exponent == 2
    assert [v * 4 for v in values(server.sums[0].payload, "float16")] == [147_456, 3, 6, 9]


def test_an_empty_tensor_is_present() -> None:
    server = OneServer(spec(elements=0))
    server.push(0, 1, bytearray())
    server.push(1, 1, None)
    h = server.sums[0].header
    assert (h.length, h.present, h.members) == (0, 1, 2)
