"""A job that goes well, from the first Hello to the last Leave."""

from __future__ import annotations

from gradsum.proto.control import (
    Gather,
    Gathered,
    Heartbeat,
    HeartbeatReply,
    JobEnd,
    Leave,
    Left,
    PlanAck,
    PlanMessage,
    Register,
    Registered,
    StatusQuery,
    StatusReply,
    TableMessage,
    Waiting,
    Welcome,
)
from gradsum.scheduler.core import Phase

from .cast import Cast, digest, hello, spec


def test_welcome_names_rank_world_and_an_increasing_incarnation() -> None:
    cast = Cast(workers=2, servers=1)
    cast.gather_members()
    server, one, two = (cast.last(peer, Welcome) for peer in (b"s0", b"w0", b"w1"))
    assert (server.rank, one.rank, two.rank) == (0, 0, 1)
    assert server.incarnation < one.incarnation < two.incarnation
    assert {one.world, two.world} == {2}
    assert len({server.token, one.token, two.token}) == 3
    assert (one.coordinator, one.heartbeat, one.lease) == ("c0ffee", 0.5, 10.0)


def test_plan_goes_to_servers_first_and_to_workers_without_tokens() -> None:
    cast = Cast(workers=2, servers=2)
    cast.gather_members()
    assert not cast.got(b"w0", PlanMessage)
    plan = cast.last(b"s1", PlanMessage)
    assert plan.tokens == ((0, cast.tokens[b"w0"]), (1, cast.tokens[b"w1"]))
    cast.send(b"s0", PlanAck(plan.epoch))
    assert not cast.got(b"w0", PlanMessage)
    cast.send(b"s1", PlanAck(plan.epoch))
    assert cast.last(b"w1", PlanMessage) == plan._replace(tokens=())
    assert (plan.epoch, plan.job, plan.fence, plan.packing) == (1, "job", 0, ())
    assert [(s[0], s.data, s.weight) for s in plan.servers] == [
        (0, "tcp://127.0.0.1:5200", 0.5),
        (1, "tcp://127.0.0.1:5201", 0.5),
    ]
    assert cast.core.phase is Phase.RUNNING


def test_plan_is_repeated_until_each_server_has_acknowledged() -> None:
    cast = Cast(workers=1, servers=2)
    cast.gather_members()
    cast.send(b"s0", PlanAck(1))
    cast.clear()
    cast.wait(1.3, beat=(b"w0", b"s0", b"s1"))
    assert cast.got(b"s0", PlanMessage) == []
    assert len(cast.got(b"s1", PlanMessage)) == 1


def test_register_gather_heartbeat_leave() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    keys = cast.register(b"w0", 1, spec("a", 2, 3), spec("b", 4))
    assert keys == (0, 1)
    for peer in (b"s0", b"w0", b"w1"):
        assert cast.last(peer, TableMessage) == TableMessage(0, (spec("a", 2, 3), spec("b", 4)))
    mine = [type(m) for m in cast.inbox[b"w0"]]
    assert mine.index(TableMessage) < mine.index(Registered)
    cast.clear()
    assert cast.register(b"w1", 7, spec("b", 4), spec("a", 2, 3)) == (1, 0)
    assert not cast.got(b"w1", TableMessage)

    cast.send(b"w0", Gather(2, "t", 1, b"zero"))
    assert not cast.got(b"w0", Gathered)
    cast.send(b"w1", Gather(8, "t", 1, b"one"))
    assert cast.last(b"w0", Gathered) == Gathered(2, {0: b"zero", 1: b"one"})
    assert cast.last(b"w1", Gathered) == Gathered(8, {0: b"zero", 1: b"one"})

    same = digest(spec("a", 2, 3), spec("b", 4))
    cast.send(b"w1", Heartbeat(cast.tokens[b"w1"], 5, 1, 2, same, 0.5, {"bytes": 7}))
    assert cast.last(b"w1", HeartbeatReply) == HeartbeatReply(1, 2, 0, ())

    cast.send(b"w1", Leave("done"))
    assert cast.last(b"w1", Left) == cast.last(b"w0", Left) == Left(1)
    assert cast.over() == []
    cast.beat(b"w0")
    assert cast.last(b"w0", HeartbeatReply).left == (1,)
    cast.send(b"w0", Leave("done"))
    assert cast.last(b"s0", JobEnd) == JobEnd("job", False)
    assert cast.over() == [False]
    assert cast.core.phase is Phase.IDLE


def test_next_job_gets_a_clean_table_and_higher_epoch_and_incarnations() -> None:
    cast = Cast(workers=1, servers=1)
    cast.start()
    cast.register(b"w0", 1, spec("w", 4))
    cast.send(b"w0", Leave(""))
    cast.clear()
    cast.send(b"x", hello("worker", 0, job="second", pid=9))
    plan = cast.last(b"s0", PlanMessage)
    assert (plan.job, plan.epoch, plan.versions) == ("second", 2, ())
    cast.acknowledge()
    assert cast.last(b"x", Welcome).incarnation == 3
    assert cast.register(b"x", 1, spec("other", 1), spec("w", 2, 3)) == (0, 1)


def test_waiting_says_who_is_missing_at_once_and_every_two_seconds() -> None:
    cast = Cast(workers=3, servers=2)
    cast.send(b"s0", hello("server", 0))
    cast.send(b"w2", hello("worker", 2))
    text = (
        "waiting for 1 of 2 servers and for worker ranks 0-1; "
        "here: worker rank 2 (host pid 102), servers 0"
    )
    assert cast.last(b"w2", Waiting) == Waiting(text)
    assert cast.logs("info").count(text) == 1
    cast.clear()
    cast.wait(4.3, beat=(b"s0", b"w2"))
    assert cast.got(b"w2", Waiting) == [Waiting(text)] * 2
    assert cast.got(b"s0", Waiting) == [Waiting(text)] * 2
    assert text not in cast.logs()
    cast.send(b"w0", hello("worker", 0))
    cast.wait(2.1, beat=(b"s0", b"w2"))
    assert (
        "for worker rank 1; here: worker ranks 0 (host pid 100), 2"
        in cast.last(b"w2", Waiting).text
    )


def test_status_shows_members_servers_and_who_has_not_named_a_tensor() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    cast.register(b"w0", 1, spec("a", 8))
    same = digest(spec("a", 8))
    cast.send(b"w1", Heartbeat(cast.tokens[b"w1"], 3, 1, 1, same, 6.5, {"rounds": 4}))
    cast.now += 0.25
    cast.send(b"anybody", StatusQuery(11))
    reply = cast.last(b"anybody", StatusReply)
    status = reply.status
    assert reply.req == 11
    assert (status["state"], status["job"], status["epoch"]) == ("running", "job", 1)
    assert (status["tensors"], status["bytes"], status["packing"]) == (1, 32, 0)
    assert status["unnamed"] == {"a": [1]}
    rank1 = status["members"][1]
    assert (rank1["step"], rank1["age"], rank1["stalled"]) == (3, 0.25, True)
    assert rank1["info"] == {"rounds": 4}
    assert status["servers"][0]["address"] == "tcp://127.0.0.1:5200"
    assert status["servers"][0]["weight"] == 1.0


def test_a_request_that_comes_again_is_answered_again_and_executed_once() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    request = Register(1, "opt0", (spec("a", 2),))
    cast.send(b"w0", request, request)
    assert cast.got(b"w0", Registered) == [Registered(1, (0,))] * 2
    assert len(cast.got(b"s0", TableMessage)) == 1
    cast.register(b"w1", 1, spec("a", 2), group="opt0")
    assert cast.over() == []
    assert cast.core.phase is Phase.RUNNING
