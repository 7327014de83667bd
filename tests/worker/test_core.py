"""Core: events in, actions and records out; what the rules' scenarios do not cover."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradsum.errors import GradsumError, MismatchError, ProtocolError
from gradsum.proto import data, peer
from gradsum.scheduler.policy import Policy
from gradsum.worker import core as working
from gradsum.worker.transfers import PULL_FIRST
from tests.sim.build import OneWorker, array, plan, spec, values
from tests.sim.oracle import Box

PACK = Policy(pack="opt0")
BROADCAST = Policy("broadcast", 1)


def got(op: Any) -> list[float]:
    assert isinstance(op.sink, Box)
    found: list[float] = op.sink.values.tolist()
    return found


def test_a_push_says_everything_that_a_server_checks() -> None:
    worker = OneWorker(spec("a"), spec("b", wire="float64"), servers=2, epoch=3)
    worker.submit(1, array(1, 2, 3, 4, wire="float64"), key=1, priority=-7)
    h = worker.sent[0].header
    assert (h.kind, h.job, h.epoch, h.key, h.slice, h.version) == (data.PUSH, "j", 3, 1, 0, 1)
    assert (h.rank, h.incarnation, h.server_incarnation) == (0, 10, 100 + worker.sent[0].server)
    assert (h.length, h.members, h.present, h.priority, h.encoding) == (32, 2, 1, -7, 1)
    assert (h.generation, h.offset, h.seq) == (1, 32 + 256, 1)


def test_payloads_are_views_of_the_callers_memory() -> None:
    worker = OneWorker()
    source = array(1, 2, 3, 4)
    worker.submit(1, source)
    source[:4] = array(9)
    payload = worker.sent[0].payload
    assert payload is not None
    assert values(payload) == [9, 2, 3, 4]


def test_slices_go_to_their_servers_and_come_back_in_any_order() -> None:
    worker = OneWorker(spec(elements=600), servers=2)
    numbers = np.arange(600, dtype="float32")
    op = worker.submit(1, bytearray(numbers.tobytes()))
    assert [(s.server, s.header.slice, s.header.length) for s in worker.sent] == [
        (0, 0, 1024), (1, 1, 1024), (0, 2, 352)
    ]  # fmt: skip
    doubled = (2 * numbers).tobytes()
    for index, server in ((2, 0), (0, 0), (1, 1)):
        assert not worker.done
        worker.sum(1, doubled[index * 1024 : (index + 1) * 1024], index=index, server=server)
    assert worker.done == [op]
    assert got(op) == (2 * numbers).tolist()


def test_a_packed_round_is_scattered_over_slices_and_tensors() -> None:
    specs = [spec(name, size, policy=PACK) for name, size in (("a", 3), ("b", 5), ("c", 2))]
    worker = OneWorker(*specs, slice_bytes=16, pack_bytes=64, packing=(2, 0, 1), packed=3)
    ops = [worker.submit(1, array(*[key] * size), key=key) for key, size in ((0, 3), (1, 5))]
    ops.append(worker.submit(1, None, key=2))
    assert [s.header.length for s in worker.sent] == [16, 16, 8]
    assert {s.header.mask for s in worker.sent} == {b"\x06"}  # places in the buffer: c, a, b
    total = array(0, 0, *range(1, 9))
    for index in (1, 0, 2):
        worker.sum(1, total[index * 16 : index * 16 + 16], key=2, index=index, mask=b"\x06")
    assert [op.outcome for op in ops] == [(True, 2), (True, 2), (False, 2)]
    assert (got(ops[0]), got(ops[1])) == ([1, 2, 3], [4, 5, 6, 7, 8])
    assert np.isnan(got(ops[2])).all()


def test_the_exponent_reaches_the_sink() -> None:
    worker = OneWorker(spec(wire="float16"))
    op = worker.submit(1, array(1, 1, 1, 1, wire="float16"))
    worker.sum(1, array(1, 2, 3, 4, wire="float16"), exponent=3)
    assert got(op) == [8, 16, 24, 32]


@pytest.mark.parametrize("payload", [None, b""], ids=["no frame", "an empty frame"])
def test_an_empty_tensor_is_present_with_or_without_a_frame(payload: bytes | None) -> None:
    worker = OneWorker(spec(elements=0))
    op = worker.submit(1, bytearray())
    assert worker.sent[0].header.kind == data.PUSH
    worker.sum(1, payload, present=2)
    assert op.outcome == (True, 2)


def test_a_sum_before_the_receipt_ends_the_push() -> None:
    worker = OneWorker()
    worker.submit(1, array(1, 1, 1, 1))
    worker.sum(1, array(2, 2, 2, 2))
    worker.receipt(worker.sent[0])
    worker.tell(0, peer.Stable(0, 0, 1))
    worker.tick(5.0)
    assert len(worker.sent) == 1
    assert not worker.heard(peer.Pull)


def test_a_second_copy_of_a_sum_is_ignored() -> None:
    worker = OneWorker()
    op = worker.submit(1, array(1, 1, 1, 1))
    worker.sum(1, array(2, 2, 2, 2))
    worker.sum(1, array(7, 7, 7, 7))
    assert worker.done == [op]
    assert got(op) == [2, 2, 2, 2]


def test_a_sum_of_the_wrong_length_is_a_protocol_error() -> None:
    worker = OneWorker()
    worker.submit(1, array(1, 1, 1, 1))
    with pytest.raises(ProtocolError, match="server 0 sent SUM"):
        worker.sum(1, array(2, 2))


def test_a_reader_waits_pulls_and_acknowledges_at_once() -> None:
    worker = OneWorker(spec(policy=BROADCAST))
    op = worker.submit(1, None)
    assert not worker.sent
    worker.tick(PULL_FIRST + 0.05)
    assert worker.heard(peer.Pull) == [peer.Pull(0, 0, 1)]
    worker.sum(1, array(5, 6, 7, 8), present=1, members=1)
    assert op.outcome == (True, 1)
    assert got(op) == [5, 6, 7, 8]
    assert worker.heard(peer.Ack) == [peer.Ack(0, 0, 1)]


def test_a_root_is_done_when_every_slice_has_its_receipt() -> None:
    worker = OneWorker(spec(elements=300, policy=BROADCAST), rank=1)
    op = worker.submit(1, bytearray(1200), sink=False)
    worker.receipt(worker.sent[1])
    assert not worker.done
    worker.receipt(worker.sent[0])
    assert worker.done == [op]
    assert op.outcome == (True, 1)
    assert not worker.core.idle()
    worker.tell(0, peer.Stable(0, 0, 1), peer.Stable(0, 1, 1))
    assert worker.core.idle()
    assert worker.core.submitted() == {0: 1}


def test_stable_before_the_receipt_is_as_good() -> None:
    worker = OneWorker(spec(policy=BROADCAST), rank=1)
    op = worker.submit(1, array(1, 1, 1, 1), sink=False)
    worker.tell(0, peer.Stable(0, 0, 1))
    worker.receipt(worker.sent[0])
    assert worker.done == [op]
    assert worker.core.settled()


def test_urgent_slices_leave_first_when_credit_comes() -> None:
    worker = OneWorker(*(spec(f"t{i}") for i in range(3)), credit=0)
    for key, priority in ((0, 3), (1, -1), (2, 0)):
        worker.submit(1, array(1, 1, 1, 1), key=key, priority=priority)
    worker.tell(0, peer.Credit(1, 0, 10_000, 10_000))
    assert [s.header.key for s in worker.sent] == [1, 2, 0]


def test_the_push_timer_doubles_to_two_seconds() -> None:
    worker = OneWorker()
    worker.submit(1, array(1, 1, 1, 1))
    worker.tick(12.9)  # at 1, 3, 5, 7, 9, 11
    assert len(worker.sent) == 7
    assert worker.core.counters["resends"] == 6
    assert len({s.header.seq for s in worker.sent}) == 7


def test_a_refused_push_fails_its_operations_and_the_next_ones() -> None:
    worker = OneWorker()
    op = worker.submit(1, array(1, 1, 1, 1))
    behind = worker.submit(2, array(1, 1, 1, 1))
    worker.tell(0, peer.Nack(0, 0, 1, "gap", 1))
    assert [f.op for f in worker.failed] == [op, behind]
    assert isinstance(worker.failed[0].error, ProtocolError)
    assert "server 0 refused tensor 't' version 1: a version was skipped" in str(
        worker.failed[0].error
    )
    late = worker.submit(3, array(1, 1, 1, 1))
    assert [f.op for f in worker.failed] == [op, behind, late]
    assert worker.core.waiting() == []


def test_a_tensor_can_be_failed_by_name() -> None:
    worker = OneWorker(spec("a"), spec("b"))
    worker.submit(1, array(1, 1, 1, 1), key=0)
    other = worker.submit(1, array(1, 1, 1, 1), key=1)
    error: GradsumError = MismatchError("shapes differ")
    worker.step(working.FailTensor("a", error))
    assert [(f.op.name, f.error) for f in worker.failed] == [("a", error)]
    assert worker.core.waiting() == [other]


def test_who_is_missing_is_noted_for_warnings() -> None:
    worker = OneWorker(workers=4)
    op = worker.submit(1, array(1, 1, 1, 1))
    worker.receipt(worker.sent[0])
    worker.tell(0, peer.Open(0, 0, 1, (2, 3)))
    assert op.missing == (2, 3)


def test_waiting_lists_the_oldest_first() -> None:
    worker = OneWorker(spec("a"), spec("b"))
    old = worker.submit(1, array(1, 1, 1, 1), key=1)
    worker.tick(0.5)
    new = worker.submit(1, array(1, 1, 1, 1), key=0)
    assert worker.core.waiting() == [old, new]


def test_an_operation_for_an_unknown_key_waits_for_the_table() -> None:
    worker = OneWorker()
    worker.core._ops.clear()
    op = OneWorker(spec("a"), spec("b")).submit(1, array(1, 1, 1, 1), key=1)
    worker.step(working.Submit(op))
    assert not worker.sent
    worker.step(working.Extend(4, ()))
    assert worker.other == [working.FetchPlan(1)]
    worker.step(working.Extend(1, (spec("b"),)))
    assert [s.header.key for s in worker.sent] == [1]


def test_a_new_plan_pushes_what_is_open_again() -> None:
    worker = OneWorker(spec(elements=600))
    worker.submit(1, bytearray(2400))
    worker.clear()
    worker.step(working.Adopt(plan(epoch=2, slice_bytes=4096)))
    assert [(s.header.epoch, s.header.length) for s in worker.sent] == [(2, 2400)]


def test_settle_acknowledges_at_once() -> None:
    worker = OneWorker()
    worker.submit(1, array(1, 1, 1, 1))
    worker.sum(1, array(2, 2, 2, 2))
    worker.step(working.Settle())
    assert worker.heard(peer.Ack) == [peer.Ack(0, 0, 1)]


def test_the_sum_of_the_last_round_is_released_when_stable() -> None:
    worker = OneWorker()
    worker.submit(1, array(1, 1, 1, 1))
    worker.sum(1, array(2, 2, 2, 2))
    kept = worker.core._streams[0].last
    assert kept is not None
    assert [bytes(p) for p in kept.payloads] == [bytes(array(2, 2, 2, 2))]
    worker.tell(0, peer.Stable(0, 0, 1))
    assert worker.core._streams[0].last is None
    assert not kept.payloads


def test_a_new_connection_asks_again_for_sums_that_were_on_their_way() -> None:
    worker = OneWorker()
    worker.submit(1, array(1, 1, 1, 1))
    worker.receipt(worker.sent[0])
    worker.step(working.Connected(0, 2, False))
    worker.tick(0.15)
    assert worker.heard(peer.Pull) == [peer.Pull(0, 0, 1)]


def test_e7_a_rank_that_is_held_at_a_fence_is_not_idle() -> None:
    worker = OneWorker()
    worker.step(working.Pause())
    assert not worker.core.idle(), "join waits for GO: its ABSENT would complete rounds beyond"
    worker.step(working.Resume())
    assert worker.core.idle()
