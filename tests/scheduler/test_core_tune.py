"""Tuning through the whole core: step times in, planned epochs that all ranks pass, records out."""

from __future__ import annotations

from typing import Any

from gradsum.proto.control import (
    AtFence,
    Fence,
    FenceAck,
    Go,
    Heartbeat,
    PlanMessage,
    StatusQuery,
    StatusReply,
)
from gradsum.scheduler.events import Learnt
from gradsum.scheduler.record import Record, fingerprint
from gradsum.scheduler.tuner import Setting

from .cast import Cast, digest, spec
from .test_tuner import MBIT, link

SURFACE = link(500 * MBIT)


class Job:
    """Two ranks that step together; a step takes as long as the plan in force says."""

    def __init__(self, **config: Any) -> None:
        self.cast = Cast(workers=2, servers=1, tune=True, **config)
        self.cast.start()
        for peer in self.cast.worker_peers:
            self.cast.register(peer, 1, spec("a", 4))
        self.step, self.clock, self.asked = 0, 50.0, 0
        self.plans: list[PlanMessage] = []
        self.told: list[Record] = []
        self.cast.clear()

    @property
    def setting(self) -> Setting:
        plan = self.plans[-1] if self.plans else None
        return Setting(plan.slice_bytes, plan.window, plan.pack_bytes) if plan else START

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.walk()
            if self.cast.got(b"w0", Fence):
                self.pass_fence(self.cast.last(b"w0", Fence))

    def walk(self) -> None:
        """A step of both."""
        self.step += 1
        self.clock += SURFACE(self.setting)
        self.cast.now += SURFACE(self.setting)
        self.beat()

    def status(self) -> dict[str, Any]:
        """What anybody who asks is told."""
        self.asked += 1
        self.cast.send(b"x", StatusQuery(self.asked))
        return self.cast.last(b"x", StatusReply).status

    def beat(self) -> None:
        """Rank 1 is as fast as the other, by a clock of its own."""
        for rank, peer in enumerate(self.cast.worker_peers):
            info = {"passed": (self.step, self.clock + 7000.0 * rank)}
            beat = Heartbeat(self.cast.tokens[peer], self.step, 1, 0, b"", 0.0, info)
            self.cast.send(peer, beat)

    def pass_fence(self, fence: Fence) -> None:
        """All ranks go there; the plan comes to the servers, then to them."""
        assert fence.step > self.step
        self.plans.append(self.cast.pass_fence(self.step))
        self.step = fence.step
        self.clock += 5.0  # whatever they do there is no step time
        self.told += [a.record for a in self.cast.actions if isinstance(a, Learnt)]
        self.cast.clear()
        self.beat()


START = Setting(1 << 20, 8, 1 << 20)
CONFIG: dict[str, Any] = {"slice_bytes": 1 << 20, "pack_bytes": 1 << 20}
KEY = fingerprint(digest(spec("a", 4)), 2, 1)


def test_a_tuned_job_changes_its_plan_by_epochs_until_it_has_settled() -> None:
    job = Job(**CONFIG)
    job.run(150)
    plans = job.plans
    assert len(plans) >= 9
    assert [plan.epoch for plan in plans] == list(range(2, 2 + len(plans)))
    steps = [plan.step for plan in plans]
    assert all(later - earlier >= 4 for earlier, later in zip(steps, steps[1:], strict=False))
    assert len({plan.window for plan in plans}) >= 3
    assert len({plan.slice_bytes for plan in plans}) >= 3
    assert SURFACE(job.setting) < 0.93 * SURFACE(START)
    job.run(60)
    assert len(job.plans) == len(plans), "it has settled: nothing changes any more"


def test_what_was_found_is_told_once_with_the_jobs_fingerprint() -> None:
    job = Job(**CONFIG)
    job.run(210)
    told = job.told + [a.record for a in job.cast.actions if isinstance(a, Learnt)]
    assert [(it.fingerprint, it.setting, it.state) for it in told] == [
        (KEY, job.setting, "settled")
    ]
    assert abs(told[0].seconds / SURFACE(job.setting) - 1) < 1e-6, "the time at fences is left out"


def test_what_an_earlier_job_found_is_tried_first() -> None:
    found = Setting(1 << 17, 16, 1 << 19)
    job = Job(**CONFIG, learnt={KEY: found, "another": Setting(1, 1, 1)})
    job.run(12)
    assert job.plans
    first = job.plans[0]
    assert Setting(first.slice_bytes, first.window, first.pack_bytes) == found


def test_the_status_shows_what_was_tried() -> None:
    job = Job(**CONFIG)
    job.run(20)
    status = job.status()
    assert status["tunes"] is True
    tune = status["tune"]
    assert tune["state"] == "searching"
    assert tune["points"][0]["slice_bytes"] == START.slice_bytes
    assert abs(tune["points"][0]["seconds"] / SURFACE(START) - 1) < 1e-6
    assert all(p["deviation"] > 0 and p["predicted"] > 0 for p in tune["points"])
    assert tune["best"] in [
        {k: p[k] for k in ("slice_bytes", "window", "pack_bytes")} for p in tune["points"]
    ]


def test_steps_until_the_fence_comes_count_for_what_is_in_force() -> None:
    job = Job(**CONFIG)
    while not job.cast.got(b"w0", Fence):
        job.walk()
    fence, before = job.cast.last(b"w0", Fence), job.status()["tune"]["points"][0]["steps"]
    for peer in job.cast.worker_peers:
        job.cast.send(peer, FenceAck(fence.number, True, job.step))
    more = fence.step - job.step
    for _ in range(more):
        job.walk()
    assert job.status()["tune"]["points"][0]["steps"] == before + more
    assert more > 0 and len(job.status()["tune"]["points"]) == 1


def test_a_fence_that_was_given_up_is_not_asked_for_again_at_once() -> None:
    job = Job(**CONFIG, fence_limit=1.0)
    while not job.cast.got(b"w0", Fence):
        job.step += 1
        job.clock += 0.1
        job.cast.now += 0.1
        job.beat()
    fence = job.cast.last(b"w0", Fence)
    job.cast.send(b"w0", FenceAck(fence.number, True, job.step), AtFence(fence.number, {0: 1}))
    job.cast.now += 1.5
    job.beat()
    assert job.cast.last(b"w0", Go).plan.epoch == 1, "given up: rank 1 did not come"
    job.cast.clear()
    for _ in range(40):  # 4 s
        job.step += 1
        job.clock += 0.1
        job.cast.now += 0.1
        job.beat()
    assert not job.cast.got(b"w0", Fence)
    for _ in range(80):
        job.step += 1
        job.clock += 0.1
        job.cast.now += 0.1
        job.beat()
    assert job.cast.got(b"w0", Fence)


def test_without_tuning_step_times_change_nothing() -> None:
    job = Job(**CONFIG)
    quiet = Cast(workers=2, servers=1, **CONFIG)
    quiet.start()
    job.cast = quiet
    job.run(60)
    assert job.plans == []
