"""Who is let in, and what those who are not get to hear."""

from __future__ import annotations

from typing import Any

import pytest

from gradsum.proto.control import (
    Failed,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Left,
    PlanMessage,
    Refusal,
    Waiting,
    Welcome,
)
from gradsum.scheduler.core import Phase
from gradsum.scheduler.events import Log
from gradsum.scheduler.membership import listing

from .cast import Cast, hello


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"protocol": 9}, "protocol version 9 meets version 1"),
        ({"world": 3}, "told a world size of 3, the coordinator expects 2 workers"),
        ({"rank": 2}, "rank 2 is outside a world of 2 workers"),
        ({"rank": -1}, "rank -1 is outside"),
        ({"rank": 0}, "rank 0 is taken by pid 100 on host"),
        ({"job": "other", "rank": 1}, "busy with job 'job', 1 of 2 workers"),
        ({"role": "spectator"}, "unknown role 'spectator'"),
        ({"host": "h" * 600}, "longer than 512"),
    ],
)
def test_refusals_name_cause_and_remedy(changes: dict[str, Any], text: str) -> None:
    cast = Cast(workers=2, servers=1)
    cast.send(b"w0", hello("worker", 0))
    cast.send(b"x", hello(**{"role": "worker", "pid": 999, **changes}))
    cast.wait(1.0, beat=(b"w0",))
    refusal = cast.last(b"x", Refusal)
    assert text in refusal.message
    assert refusal.hint
    assert not cast.got(b"x", Welcome)
    assert len(cast.logs("warning")) == 1


def test_c16_a_second_job_is_refused_while_the_first_runs() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    cast.send(b"x", hello("worker", 0, job="other", pid=999))
    assert "busy with job 'job', 2 of 2 workers; waiting" in cast.last(b"x", Waiting).text
    cast.send(b"y", hello("worker", None, pid=999))
    cast.wait(1.0, beat=(b"w0", b"w1", b"s0"))
    assert "busy with job 'job', 2 of 2 workers" in cast.last(b"x", Refusal).message
    assert len(cast.got(b"x", Refusal)) == 1
    assert "all 2 workers of job 'job' are here" in cast.last(b"y", Refusal).message


def test_c16_a_job_that_comes_right_after_a_killed_one_waits_for_its_end() -> None:
    cast = Cast(workers=1, servers=1)
    cast.start()
    cast.close(b"w0")  # killed: nobody said goodbye
    cast.send(b"x", hello("worker", 0, job="next", pid=999))
    assert "job 'job' is ending" in cast.last(b"x", Waiting).text
    cast.wait(1.0, beat=(b"s0",))
    assert cast.over() == [True]
    assert cast.last(b"x", Welcome).rank == 0
    assert cast.last(b"s0", PlanMessage).job == "next"


@pytest.mark.parametrize("job", ["job", "next"])
def test_c16_a_hello_that_overtakes_the_news_of_a_death_is_not_refused(job: str) -> None:
    cast = Cast(workers=1, servers=1)
    cast.start()
    cast.send(b"x", hello("worker", 0, job=job, pid=999))
    cast.close(b"w0")
    cast.wait(1.0, beat=(b"s0",))
    assert cast.over() == [True]
    assert not cast.got(b"x", Refusal)
    assert cast.last(b"x", Welcome).rank == 0


def test_refusals_are_logged_under_a_key_since_strangers_can_cause_any_number() -> None:
    cast = Cast(workers=2, servers=1)
    cast.send(b"x", hello("worker", 7))
    assert [a.key for a in cast.actions if isinstance(a, Log)] == ["refused"]


def test_ranks_are_given_out_lowest_first_to_those_who_have_none() -> None:
    cast = Cast(workers=3, servers=1)
    cast.send(b"a", hello("worker", 1))
    for number, peer in enumerate((b"b", b"c")):
        cast.send(peer, hello("worker", None, pid=500 + number))
    assert [cast.last(peer, Welcome).rank for peer in (b"a", b"b", b"c")] == [1, 0, 2]


def test_a_hello_that_comes_again_gets_the_same_welcome() -> None:
    cast = Cast(workers=2, servers=1)
    cast.send(b"w0", hello("worker", None), hello("worker", None))
    one, two = cast.got(b"w0", Welcome)
    assert one == two
    cast.send(b"new", hello("worker", 0, token=one.token))
    assert cast.last(b"new", Welcome) == one, "a reconnect with its token"
    cast.close(b"w0")
    cast.wait(5.0, beat=(b"new",))
    assert cast.core.phase is Phase.WAITING, "the old connection's end means nothing"


def test_a_process_whose_welcome_was_lost_is_recognised() -> None:
    cast = Cast(workers=2, servers=1)
    cast.send(b"w0", hello("worker", 0))
    cast.close(b"w0")
    cast.send(b"again", hello("worker", 0))
    assert cast.last(b"again", Welcome) == cast.last(b"w0", Welcome)


def test_an_unnoticed_reconnect_is_healed_by_the_heartbeat() -> None:
    cast = Cast(workers=1, servers=1)
    cast.start()
    cast.close(b"w0")
    cast.send(b"new", Heartbeat(cast.tokens[b"w0"], 0, 1, 0, b"", 0.0, {}))
    assert cast.last(b"new", HeartbeatReply).epoch == 1
    assert cast.last(b"new", PlanMessage).epoch == 1
    cast.tokens[b"new"] = cast.tokens[b"w0"]
    cast.wait(3.0, beat=(b"new", b"s0"))
    assert cast.core.phase is Phase.RUNNING


@pytest.mark.parametrize("token", [b"", b"guess"])
def test_a_heartbeat_of_nobody_is_told_to_say_hello(token: bytes) -> None:
    cast = Cast(workers=1, servers=1)
    cast.start()
    for peer in (b"stranger", b"w0"):
        cast.send(peer, Heartbeat(token, 0, 0, 0, b"", 0.0, {}))
        assert "say hello" in cast.last(peer, Refusal).message
    cast.beat(b"w0")
    assert cast.got(b"w0", HeartbeatReply)


def test_places_are_freed_before_the_job_runs_and_taken_again() -> None:
    cast = Cast(workers=2, servers=1)
    cast.send(b"w0", hello("worker", 0))
    cast.send(b"w0", Leave("changed its mind"))
    assert cast.last(b"w0", Left) == Left(0)
    assert cast.core.phase is Phase.IDLE
    cast.send(b"x", hello("worker", 0, job="another", pid=7))
    cast.close(b"x")
    cast.wait(1.0)
    assert cast.core.phase is Phase.IDLE
    assert any("worker rank 0 (host:pid 7) ended" in text for text in cast.logs("warning"))
    cast.gather_members()
    cast.acknowledge()
    assert cast.last(b"w0", PlanMessage).job == "job"
    assert cast.over() == [], "no job has run"


def test_a_member_lost_before_the_servers_acknowledged_takes_the_plan_back() -> None:
    cast = Cast(workers=2, servers=1)
    cast.gather_members()
    cast.close(b"w1")
    cast.wait(1.0, beat=(b"w0", b"s0"))
    assert cast.core.phase is Phase.WAITING
    cast.acknowledge()
    assert not cast.got(b"w0", PlanMessage)
    cast.send(b"y", hello("worker", 1, pid=77))
    cast.acknowledge()
    plan = cast.last(b"y", PlanMessage)
    assert plan.epoch == 2
    assert dict(plan.members)[1] == cast.last(b"y", Welcome).incarnation


def test_servers_beyond_the_number_are_refused_and_one_that_replaces_a_dead_one_waits() -> None:
    cast = Cast(workers=1, servers=1)
    cast.start()
    cast.send(b"extra", hello("server", 5))
    cast.wait(1.0, beat=(b"s0",))
    assert "all 1 servers are here" in cast.last(b"extra", Refusal).message
    cast.close(b"s0")
    cast.send(b"new", hello("server", 6))
    assert cast.got(b"new", Waiting) and not cast.got(b"new", Welcome)
    cast.wait(1.0, beat=(b"w0",))
    assert cast.core.phase is Phase.FAILED
    cast.send(b"w0", Leave(""))
    assert cast.last(b"new", Welcome).rank == 0


def test_a_server_that_leaves_when_idle_frees_its_place() -> None:
    cast = Cast(workers=1, servers=1)
    cast.send(b"s0", hello("server", 0))
    cast.send(b"s0", Leave("SIGTERM"))
    assert cast.last(b"s0", Left) == Left(0)
    cast.send(b"t", hello("server", 1))
    assert cast.last(b"t", Welcome).rank == 0


def test_the_start_has_a_deadline() -> None:
    cast = Cast(workers=2, servers=1, start_timeout=30.0)
    cast.send(b"s0", hello("server", 0))
    cast.send(b"w0", hello("worker", 0))
    cast.wait(29.0, beat=(b"w0", b"s0"))
    assert not cast.got(b"w0", Failed)
    cast.wait(2.0, beat=(b"w0", b"s0"))
    text = cast.last(b"w0", Failed).message
    assert "did not start within 30 s: waiting for worker rank 1; here: worker rank 0" in text
    assert cast.over() == []
    cast.wait(6.0, beat=(b"w0", b"s0"))
    assert cast.over() == [True]


def test_listing_folds_runs() -> None:
    assert listing([5, 0, 1, 2]) == "0-2, 5"
    assert listing([]) == ""
