"""Rules V2, V5, I2-I5, one scenario each: versions, ABSENT, who is believed."""

from __future__ import annotations

from typing import Any

import pytest

from gradsum.errors import ProtocolError
from gradsum.proto import peer
from gradsum.proto.data import ABSENT
from gradsum.scheduler.credit import Bounds
from gradsum.scheduler.policy import Policy
from gradsum.server import engine as serving
from gradsum.worker import core as working
from tests.sim.build import OneServer, OneWorker, array, plan, spec, values
from tests.sim.oracle import Box

BROADCAST = Policy("broadcast", 0)
PACK = Policy(pack="opt0")


def test_v2_the_next_version_waits_until_the_sum_is_in() -> None:
    worker = OneWorker()
    worker.submit(1, array(1, 1, 1, 1))
    worker.submit(2, array(2, 2, 2, 2))
    assert [s.header.version for s in worker.sent] == [1]
    worker.sum(1, array(5, 5, 5, 5))
    assert [s.header.version for s in worker.sent] == [1, 2]


def test_v2_operations_may_be_at_hand_before_plan_table_and_connections() -> None:
    core = working.Core(0, 10, b"t", bounds=Bounds(1000), heartbeat=0.5)
    worker = OneWorker.__new__(OneWorker)
    worker.__dict__.update(now=1.0, core=core, sent=[], done=[], failed=[], other=[], said={0: []})
    op = working.Submit(OneWorker().submit(1, array(1, 1, 1, 1)))
    worker.step(op)
    worker.step(working.Extend(0, (spec(),)))
    worker.step(working.Adopt(plan()))
    worker.step(working.Connected(0, 1, False))
    assert not worker.sent
    worker.tell(0, peer.Attached(1, False), peer.Credit(1, 0, 1000, 1000))
    assert len(worker.sent) == 1


def test_v5_absent_is_a_push_without_payload_with_the_same_timer() -> None:
    worker = OneWorker()
    worker.submit(1, None)
    worker.tick(1.01)
    assert [(s.header.kind, s.payload) for s in worker.sent] == [(ABSENT, None)] * 2


def test_v5_present_and_members_come_with_the_sum() -> None:
    server = OneServer()
    server.push(0, 1, array(3, 3, 3, 3))
    server.push(1, 1, None)
    header = server.sums[0].header
    assert (header.present, header.members, values(server.sums[0].payload)) == (1, 2, [3] * 4)


def test_v5_all_absent_is_a_header_only_sum_and_the_gradient_is_untouched() -> None:
    server, worker = OneServer(), OneWorker()
    server.push(0, 1, None)
    server.push(1, 1, None)
    assert server.sums[0].payload is None
    assert (server.sums[0].header.length, server.sums[0].header.present) == (0, 0)
    op = worker.submit(1, None)
    worker.sum(1, None)
    assert worker.done == [op]
    assert not op.present
    assert isinstance(op.sink, Box) and op.sink.calls == 0


def test_v5_a_packed_buffer_says_per_tensor_who_is_there() -> None:
    specs = (spec("a", 2, policy=PACK), spec("b", 2, policy=PACK))
    packed: dict[str, Any] = {"pack_bytes": 64, "packing": (0, 1), "packed": 2}
    server = OneServer(*specs, **packed)
    server.push(0, 1, array(1, 1, 0, 0), mask=b"\x01")
    server.push(1, 1, array(2, 2, 0, 0), mask=b"\x01")
    assert server.sums[0].header.mask == b"\x01"
    worker = OneWorker(*specs, **packed)
    first, second = worker.submit(1, array(1, 1), key=0), worker.submit(1, None, key=1)
    assert worker.sent[0].header.mask == b"\x01"
    worker.sum(1, server.sums[0].payload, mask=b"\x01")
    assert worker.done == [first, second]
    assert (first.present, second.present) == (True, False)


def test_i2_only_the_token_of_the_plan_owns_a_rank() -> None:
    engine = OneServer().engine
    assert engine.owns(1, 11, b"token1")
    assert not engine.owns(1, 11, b"token0")
    assert not engine.owns(1, 12, b"token1")
    assert not engine.owns(7, 17, b"token7")


def test_i3_a_frame_that_cannot_be_right_is_refused_and_harms_nobody() -> None:
    server = OneServer(spec("a"), spec("b", policy=BROADCAST))
    server.push(0, 1, array(1, 1, 1, 1))
    wrong: list[dict[str, Any]] = [
        {"payload": array(1)},
        {"payload": array(1, 1, wire="float64"), "wire": "float64"},
        {"payload": array(1, 1, 1, 1), "index": 5},
        {"payload": array(1, 1, 1, 1), "key": 1},
    ]
    for frame in wrong:
        with pytest.raises(ProtocolError, match="slice|dtype|write"):
            server.push(1, 1, **frame)
    assert server.engine.counters["rejected"] == 4
    server.push(1, 1, array(1, 1, 1, 1))
    assert values(server.sums[0].payload) == [2, 2, 2, 2]


def test_i4_nothing_is_served_before_a_plan() -> None:
    server = OneServer()
    server.step(serving.Reset())
    assert server.engine.plan is None
    assert not server.engine.owns(0, 10, b"token0")
    server.step(serving.Attached(0, 1, False))
    server.clear()
    server._offsets[0] = 0
    server.push(0, 1, array(1, 1, 1, 1), epoch=1)
    assert not server.heard(0, peer.Receipt)
    server.say(0, peer.Pull(0, 0, 1), epoch=1)
    assert not server.sums


@pytest.mark.parametrize(
    "change",
    [{"epoch": 0}, {"epoch": 2}, {"incarnation": 7}, {"version": 2}, {"index": 3}, {"key": 1}],
    ids=str,
)
def test_i5_a_sum_is_taken_only_for_the_awaited_version_of_the_plan(
    change: dict[str, int],
) -> None:
    worker = OneWorker()
    op = worker.submit(1, array(1, 1, 1, 1))
    worker.sum(**{"version": 1, **change}, payload=array(9, 9, 9, 9))  # type: ignore[arg-type]
    assert not worker.done
    assert worker.core.counters["ignored"] == 1
    worker.sum(1, array(2, 2, 2, 2))
    assert worker.done == [op]


def test_i5_a_sum_or_receipt_from_a_server_that_does_not_own_the_slice_is_ignored() -> None:
    worker = OneWorker(servers=2)
    worker.submit(1, array(1, 1, 1, 1))
    owner = worker.sent[0].server
    worker.sum(1, array(9, 9, 9, 9), server=1 - owner)
    worker.tell(1 - owner, peer.Receipt(0, 0, 1, worker.sent[0].header.seq))
    assert not worker.done
    worker.tick(1.01)
    assert len(worker.sent) == 2  # the push timer still runs


def test_i5_records_of_another_epoch_are_ignored_but_stable_is_a_fact() -> None:
    worker = OneWorker(epoch=3)
    worker.submit(1, array(1, 1, 1, 1))
    worker.sum(1, array(2, 2, 2, 2))
    worker.submit(2, array(1, 1, 1, 1))
    worker.tell(0, peer.Receipt(0, 0, 2, worker.sent[1].header.seq), epoch=2)
    worker.tell(0, peer.Stable(0, 0, 1), epoch=2)
    worker.tick(1.01)
    assert [s.header.version for s in worker.sent] == [1, 2, 2]
    assert worker.core._streams[0].last is None
