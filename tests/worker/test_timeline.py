"""What a worker's frames become: one push and one sum a slice, whatever is lost or repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradsum.proto import peer
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import TensorSpec
from gradsum.trace import Span, Trace
from gradsum.worker.core import SendPush, SumFrame
from gradsum.worker.rounds import Op
from gradsum.worker.timeline import Timeline, WatchedHandle
from tests.sim.build import OneWorker, array, spec

RUN = "coordinator"


class Watched(OneWorker):
    """A worker whose frames are seen as its comm thread would show them."""

    def __init__(self, folder: Path, *specs: TensorSpec, **changes: Any) -> None:
        super().__init__(*specs, **changes)
        self.timeline = Timeline(Trace(folder, "worker"), lambda: self.now)

    def step(self, event: Any) -> None:
        if isinstance(event, SumFrame):
            self.timeline.takes(event, self.core, RUN, super().step)
        else:
            super().step(event)

    def leave(self, *pushes: SendPush) -> None:
        for push in pushes or self.sent:
            self.timeline.leaves(push, RUN)

    def receipt(self, sent: SendPush) -> None:
        h = sent.header
        self.timeline.heard([peer.Receipt(h.key, h.slice, h.version, h.seq)])
        super().receipt(sent)

    def at(self, now: float) -> None:
        self.now = now

    @property
    def spans(self) -> list[Span]:
        return self.timeline.trace._first

    def times(self) -> list[tuple[str, float, float]]:
        return [(s.kind, s.start, s.end) for s in self.spans]


def test_a_slice_is_queued_pushed_and_summed(tmp_path: Path) -> None:
    worker = Watched(tmp_path, spec("layer.weight"), servers=1, epoch=3)
    worker.submit(1, array(1, 2, 3, 4), priority=-7)
    worker.at(101.0)
    worker.leave()
    worker.at(102.0)
    worker.receipt(worker.sent[0])
    worker.at(104.0)
    worker.sum(1, array(2, 2, 2, 2))
    assert worker.times() == [("queue", 100, 101), ("push", 101, 102), ("sum", 102, 104)]
    assert {s.name for s in worker.spans} == {"layer.weight"}
    push, total = worker.spans[1:]
    assert tuple(push.args) == (0, 0, 1, 0, 16, -7, 0, 3)
    assert push.flow is not None
    assert total.flow is not None
    assert (push.flow.end, push.flow.at, push.flow.direction) == ("s", 101, "push")
    assert (total.flow.end, total.flow.at, total.flow.direction) == ("f", 104, "sum")
    assert push.flow.ident == "coordina.10 k0.0 v1 r0 push"
    assert total.flow.ident == "coordina.10 k0.0 v1 r0 sum"


def test_a_sum_before_the_receipt_ends_the_push_and_the_receipt_adds_nothing(
    tmp_path: Path,
) -> None:
    worker = Watched(tmp_path)
    worker.submit(1, array(1, 2, 3, 4))
    worker.leave()
    worker.at(103.0)
    worker.sum(1, array(2, 2, 2, 2))
    worker.at(105.0)
    worker.receipt(worker.sent[0])
    assert worker.times() == [("queue", 100, 100), ("push", 100, 103), ("sum", 103, 103)]


def test_a_slice_that_is_sent_again_stays_one_push(tmp_path: Path) -> None:
    worker = Watched(tmp_path)
    worker.submit(1, array(1, 2, 3, 4))
    worker.leave()
    worker.tick(3.0)  # no receipt comes: the push is repeated
    assert len(worker.sent) > 1
    worker.leave(*worker.sent[1:])
    worker.receipt(worker.sent[-1])
    worker.receipt(worker.sent[-1])
    worker.sum(1, array(2, 2, 2, 2))
    worker.sum(1, array(2, 2, 2, 2))  # a second copy is ignored
    assert [(s.kind, s.start) for s in worker.spans] == [
        ("queue", 100.0), ("push", 100.0), ("sum", 103.0)
    ]  # fmt: skip


def test_a_sum_that_nobody_awaits_leaves_no_mark(tmp_path: Path) -> None:
    worker = Watched(tmp_path)
    worker.submit(1, array(1, 2, 3, 4))
    worker.leave()
    worker.sum(2, array(2, 2, 2, 2))
    worker.sum(1, array(2, 2, 2, 2), epoch=9)
    assert [s.kind for s in worker.spans] == ["queue"]


def test_a_packed_slice_is_queued_from_its_last_tensor_on(tmp_path: Path) -> None:
    pack = Policy(pack="opt0")
    specs = [spec(name, size, policy=pack) for name, size in (("a", 3), ("b", 5))]
    worker = Watched(tmp_path, *specs, pack_bytes=64, packing=(1, 0), packed=2)
    worker.submit(1, array(1, 2, 3), key=0)
    worker.at(101.5)
    worker.submit(1, array(1, 2, 3, 4, 5), key=1)
    worker.at(102.0)
    worker.leave()
    (queued,) = worker.spans
    assert (queued.name, queued.start, queued.end) == ("b", 101.5, 102.0)


def test_the_root_of_a_broadcast_awaits_no_sum_and_a_reader_pushes_nothing(tmp_path: Path) -> None:
    shared = spec(policy=Policy("broadcast", 0))
    root = Watched(tmp_path, shared)
    root.submit(1, array(1, 2, 3, 4))
    root.leave()
    root.receipt(root.sent[0])
    assert [s.kind for s in root.spans] == ["queue", "push"]
    assert not root.timeline._open
    reader = Watched(tmp_path, shared, rank=1)
    reader.submit(1, None)
    reader.at(101.0)
    reader.sum(1, array(1, 2, 3, 4))
    assert reader.times() == [("sum", 101, 101)]


def test_only_waits_that_block_are_recorded(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "worker")
    op = Op(2, "layer.bias", 5, memoryview(bytes(12)), None, 1)
    handle = WatchedHandle(op, 0.05, Timeline(trace))
    with pytest.raises(TimeoutError, match=r"layer\.bias"):
        handle.wait()
    handle.finish()
    handle.wait()
    (waited,) = trace._first
    assert (waited.kind, waited.name, tuple(waited.args)) == ("wait", "layer.bias", (2, 5, 12, 1))
    assert waited.end - waited.start >= 0.05
