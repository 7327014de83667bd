"""Planned epochs through the whole core: packing after window 1, re-slicing, aborts (E1, E8)."""

from __future__ import annotations

from gradsum.proto.control import (
    AtFence,
    Consume,
    Consumed,
    Failed,
    Fence,
    FenceAck,
    FetchPlan,
    Firings,
    Go,
    Heartbeat,
    HeartbeatReply,
    Joined,
    Leave,
    PlanAck,
    PlanMessage,
    Registered,
    Replan,
    WindowReport,
)
from gradsum.scheduler.core import Phase

from .cast import Cast, spec


def beat(cast: Cast, peer: bytes, step: int, epoch: int = 1) -> None:
    cast.send(peer, Heartbeat(cast.tokens[peer], step, epoch, 0, b"", 0.0, {}))


def packed_job(servers: int = 1) -> Cast:
    """Two workers whose window reports have made a packing fence; nobody has answered it."""
    cast = Cast(workers=2, servers=servers)
    cast.start()
    specs = [spec(name, 4, pack="opt0") for name in "abc"] + [spec("raw", 4, first=3)]
    for peer in cast.worker_peers:
        cast.register(peer, 1, *specs)
    beat(cast, b"w0", 5)
    beat(cast, b"w1", 4)
    cast.clear()
    cast.send(b"w0", WindowReport("opt0", {0: 1, 2: 1}, (2, 0)))
    assert not cast.got(b"w0", Firings)
    cast.send(b"w1", WindowReport("opt0", {0: 1, 1: 1, 2: 1}, (0, 1, 2)))
    return cast


def arrive(cast: Cast, number: int, versions: dict[int, int]) -> None:
    for peer in cast.worker_peers:
        cast.send(peer, FenceAck(number, True, 5), AtFence(number, versions))
    consume(cast, number)


def consume(cast: Cast, number: int) -> None:
    """Those who are asked to consume have done it."""
    for peer in cast.worker_peers:
        if cast.got(peer, Consume):
            cast.send(peer, Consumed(number))


def test_e8_packing_begins_at_the_first_fence_after_window_1() -> None:
    cast = packed_job(servers=2)
    for peer in cast.worker_peers:
        assert cast.last(peer, Firings) == Firings("opt0", {0: 1, 1: 1, 2: 1})
        assert cast.last(peer, Fence) == Fence(1, 1, 6)
    beat(cast, b"w0", 5)
    assert cast.last(b"w0", HeartbeatReply).fence == 1
    cast.send(b"w0", FenceAck(1, True, 5), AtFence(1, {0: 7, 1: 7, 2: 7}))
    assert not cast.got(b"s0", PlanMessage)
    cast.send(b"w1", FenceAck(1, True, 5), AtFence(1, {0: 7, 1: 7, 2: 7}))
    consume(cast, 1)
    plan = cast.last(b"s1", PlanMessage)
    assert (plan.epoch, plan.fence, plan.step, plan.packed) == (2, 1, 6, 4)
    assert plan.packing == (2, 0, 1)
    assert dict(plan.versions) == {0: 7, 1: 7, 2: 7, 3: 2}
    assert len(plan.tokens) == 2
    cast.send(b"s0", PlanAck(2))
    assert not cast.got(b"w0", Go), "servers first"
    cast.send(b"s1", PlanAck(2))
    for peer in cast.worker_peers:
        assert cast.last(peer, Go) == Go(1, plan._replace(tokens=()))
    beat(cast, b"w0", 7, epoch=2)
    reply = cast.last(b"w0", HeartbeatReply)
    assert (reply.epoch, reply.fence) == (2, 0)


def test_e1_a_rank_that_is_past_the_step_gets_a_new_fence_for_all() -> None:
    cast = packed_job()
    cast.send(b"w0", FenceAck(1, True, 5))
    cast.send(b"w1", FenceAck(1, False, 9))
    for peer in cast.worker_peers:
        assert cast.last(peer, Fence) == Fence(2, 1, 11)
    arrive(cast, 2, {0: 11})
    cast.acknowledge()
    assert cast.last(b"w0", Go).number == 2
    assert cast.last(b"w0", Go).plan.step == 11


def test_e1_the_clocks_start_at_what_all_ranks_have_submitted() -> None:
    cast = packed_job()
    cast.send(b"w0", FenceAck(1, True, 5), AtFence(1, {0: 7, 1: 3}))
    assert not cast.got(b"w0", Consume)
    cast.send(b"w1", FenceAck(1, True, 5), AtFence(1, {0: 8}))
    for peer in cast.worker_peers:
        target = cast.last(peer, Consume)
        assert target == Consume(1, {0: 7, 1: 0, 2: 0, 3: 2})
    cast.send(b"w0", Consumed(1))
    assert not cast.got(b"s0", PlanMessage)
    cast.clear()
    cast.send(b"w1", AtFence(1, {0: 8}))
    assert cast.last(b"w1", Consume) == target, "it was lost and is said again"
    cast.send(b"w1", Consumed(1))
    assert dict(cast.last(b"s0", PlanMessage).versions) == {0: 7, 1: 0, 2: 0, 3: 2}


def test_a_rank_that_leaves_gives_the_fence_up_and_those_who_missed_it_hear_again() -> None:
    cast = packed_job()
    cast.send(b"w0", FenceAck(1, True, 5), AtFence(1, {0: 7}))
    cast.send(b"w1", Leave("done"))
    assert cast.last(b"w0", Go).plan.epoch == 1
    cast.inbox.clear()
    beat(cast, b"w0", 6)
    assert cast.last(b"w0", Go).number == 1, "it stands at the step of the fence"
    cast.inbox.clear()
    beat(cast, b"w0", 8)
    assert not cast.got(b"w0", Go)
    cast.send(b"w0", FetchPlan(9))
    assert cast.last(b"w0", Go).number == 1


def test_once_servers_have_the_plan_nobody_leaving_takes_it_back() -> None:
    cast = packed_job()
    arrive(cast, 1, {0: 7})
    cast.send(b"w1", Leave("done"))
    assert not cast.got(b"w0", Go)
    cast.acknowledge()
    assert cast.last(b"w0", Go).plan.epoch == 2
    assert not cast.got(b"w1", Go)


def test_a_joined_rank_is_not_waited_for_but_gets_the_plan() -> None:
    cast = packed_job()
    cast.send(b"w0", FenceAck(1, True, 5), AtFence(1, {0: 7}))
    cast.send(b"w1", Joined(3))
    cast.send(b"w0", Consumed(1))
    cast.acknowledge()
    assert cast.last(b"w0", Go).plan.epoch == 2
    assert cast.last(b"w1", Go).plan.epoch == 2
    assert dict(cast.last(b"w1", Go).plan.versions)[1] == 0


def test_a_lost_member_ends_the_fence_with_the_job() -> None:
    cast = packed_job()
    cast.send(b"w0", FenceAck(1, True, 5), AtFence(1, {0: 7}))
    cast.close(b"w1")
    cast.wait(1.0, beat=(b"w0", b"s0"))
    assert cast.last(b"w0", Failed).peer == "worker 1"
    assert not cast.got(b"s0", PlanMessage)


def test_a_fence_missed_by_a_reconnect_comes_with_the_plan() -> None:
    cast = packed_job()
    cast.close(b"w1")
    cast.send(b"new", Heartbeat(cast.tokens[b"w1"], 4, 1, 0, b"", 0.0, {}))
    assert cast.last(b"new", PlanMessage).epoch == 1
    assert cast.last(b"new", Fence).number == 1


def test_an_answer_lost_on_the_way_is_asked_for_at_the_heartbeat() -> None:
    cast = packed_job()
    cast.inbox.clear()
    beat(cast, b"w0", 5)
    assert cast.last(b"w0", Fence).number == 1
    cast.send(b"w0", FenceAck(1, True, 5))
    cast.inbox.clear()
    beat(cast, b"w0", 5)
    assert not cast.got(b"w0", Fence)
    beat(cast, b"w0", 6)
    assert cast.last(b"w0", Fence).number == 1


def test_a_rank_that_does_not_come_in_time_makes_the_others_go_on() -> None:
    """It may wait, in another thread, for what the ranks at the fence would push next."""
    cast = packed_job()
    cast.wait(40.0, beat=(b"w0", b"w1", b"s0"))
    cast.send(b"w0", FenceAck(1, True, 5), AtFence(1, {0: 7}))
    cast.wait(29.0, beat=(b"w0", b"w1", b"s0"))
    assert not cast.got(b"w0", Go), "the time counts from the first arrival"
    cast.send(b"w0", AtFence(1, {0: 7}))
    cast.wait(1.5, beat=(b"w0", b"w1", b"s0"))
    for peer in cast.worker_peers:
        go = cast.last(peer, Go)
        assert (go.number, go.plan.epoch, go.plan.packing) == (1, 1, ())
    assert not cast.got(b"s0", PlanMessage)
    given_up = [text for text in cast.logs("warning") if "fence 1 given up" in text]
    assert len(given_up) == 1 and "rank 1 did not pass it in 30 s" in given_up[0]
    cast.send(b"w1", FenceAck(1, True, 5), AtFence(1, {0: 7}))
    cast.wait(1.0, beat=(b"w0", b"w1", b"s0"))
    assert not cast.got(b"s0", PlanMessage), "too late"
    cast.send(b"tuner", Replan(1, 4096, 0))
    assert cast.last(b"w0", Fence).number == 2, "the next change has a fence of its own"


def test_replan_changes_slicing_and_keeps_the_rest() -> None:
    cast = packed_job()
    arrive(cast, 1, {0: 7})
    cast.acknowledge()
    cast.clear()
    cast.send(b"tuner", Replan(4, 4096, 0), Replan(4, 4096, 0))
    assert cast.got(b"tuner", Registered) == [Registered(4, ())] * 2
    fence = cast.last(b"w0", Fence)
    assert (fence.number, fence.epoch) == (2, 2)
    arrive(cast, 2, {0: 9})
    cast.acknowledge()
    plan = cast.last(b"w0", Go).plan
    assert (plan.epoch, plan.slice_bytes, plan.pack_bytes) == (3, 4096, 1 << 20)
    assert plan.packing == (2, 0, 1)
    assert dict(plan.versions)[1] == 0 and dict(plan.versions)[0] == 9
    assert len(cast.got(b"w0", Fence)) == 1, "the repeated request counted once"


def test_replan_refuses_nonsense_and_jobs_that_do_not_run() -> None:
    cast = Cast(workers=1, servers=1)
    cast.send(b"tuner", Replan(1, 4096, 0))
    assert "no job is running" in cast.last(b"tuner", Failed).message
    cast.start()
    for bad in (Replan(2, -1, 0), Replan(3, 1 << 40, 0), Replan(4, 0, -7)):
        cast.send(b"tuner", bad)
        assert cast.last(b"tuner", Failed).req == bad.req
    assert not cast.got(b"w0", Fence)
    assert cast.core.phase is Phase.RUNNING


def test_nothing_worth_packing_makes_no_fence() -> None:
    cast = Cast(workers=1, servers=1, pack_bytes=0)
    cast.start()
    cast.register(b"w0", 1, spec("a", 4, pack="opt0"), spec("b", 4, pack="opt0"))
    cast.send(b"w0", WindowReport("opt0", {0: 1, 1: 1}, (0, 1)))
    assert cast.last(b"w0", Firings)
    assert not cast.got(b"w0", Fence)


def test_fence_numbers_are_not_used_again_by_the_next_job() -> None:
    cast = packed_job()
    for peer in cast.worker_peers:
        cast.send(peer, Leave(""))
    cast.clear()
    cast.gather_members()
    cast.acknowledge()
    assert cast.last(b"w0", PlanMessage).fence == 0
    cast.send(b"w0", Replan(1, 4096, 0))
    assert cast.last(b"w0", Fence).number == 2
