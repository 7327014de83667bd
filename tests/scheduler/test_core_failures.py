"""Losses, aborts, mismatches, stops: everybody hears why, and the next job is clean."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsum.proto.codec import pack
from gradsum.proto.control import (
    CONTROL,
    Abort,
    AtFence,
    Failed,
    FenceAck,
    FetchPlan,
    Gather,
    Gathered,
    Heartbeat,
    Hello,
    JobEnd,
    Joined,
    Leave,
    Left,
    PlanAck,
    PlanMessage,
    Refusal,
    Register,
    Registered,
    Replan,
    StatusQuery,
    StatusReply,
    TableMessage,
    Welcome,
    WindowReport,
)
from gradsum.proto.limits import MAX_CONTROL
from gradsum.scheduler.core import Phase
from gradsum.scheduler.events import Disconnected, Received, Send, Stop, Tick

from .cast import Cast, digest, hello, spec


def failure(cast: Cast, peer: bytes) -> Failed:
    """The job's failure as a peer heard it."""
    found = [m for m in cast.got(peer, Failed) if m.req == 0 and not m.tensor]
    assert found, f"{peer!r} heard of no failure: {cast.inbox.get(peer)}"
    return found[0]


def test_a_killed_worker_ends_the_job_for_all_within_a_second() -> None:
    cast = Cast(workers=3, servers=1)
    cast.start()
    cast.close(b"w1")
    cast.wait(1.0, beat=(b"w0", b"w2", b"s0"))
    for peer in (b"w0", b"w2"):
        lost = failure(cast, peer)
        assert (lost.kind, lost.peer) == ("PeerLost", "worker 1")
        assert "worker rank 1 (host:pid 101) ended: its connection closed" in lost.message
        assert lost.hint
    assert not cast.got(b"s0", JobEnd), "workers have some seconds to go"
    cast.send(b"w0", Abort("a peer is lost"))
    assert cast.last(b"w0", Left) == Left(0)
    cast.close(b"w2")
    assert cast.last(b"s0", JobEnd) == JobEnd("job", True)
    assert cast.over() == [True]


def test_workers_that_do_not_go_are_left_behind_after_five_seconds() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    cast.send(b"w1", Abort("ValueError: no"))
    cast.wait(4.9, beat=(b"w0", b"s0"))
    assert cast.over() == []
    cast.wait(0.5, beat=(b"w0", b"s0"))
    assert cast.over() == [True]
    cast.clear()
    cast.beat(b"w0")
    assert "say hello" in cast.last(b"w0", Refusal).message


def test_an_abort_carries_its_cause_to_the_others() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    cast.send(b"w0", Abort("ZeroDivisionError: division by zero"))
    assert "rank 0 (host:pid 100) ended: ZeroDivisionError" in failure(cast, b"w1").message
    assert not cast.got(b"w0", Failed)


def test_a_failure_is_repeated_at_heartbeats_until_the_worker_goes() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    cast.send(b"w0", Abort("x"))
    cast.inbox.clear()  # the first one was lost on the way
    cast.beat(b"w1")
    assert failure(cast, b"w1").peer == "worker 0"
    cast.send(b"w1", Leave(""))
    assert cast.over() == [True]


def test_silence_is_suspected_at_two_seconds_and_ends_at_the_lease() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    others = (b"w0", b"s0")
    cast.wait(2.6, beat=others)
    [warning] = cast.logs("warning")
    assert "worker rank 1 (host:pid 101) not heard of for 2." in warning
    cast.wait(7.0, beat=others)
    assert cast.core.phase is Phase.RUNNING
    cast.wait(1.0, beat=others)
    assert "not heard of for 10." in failure(cast, b"w0").message


def test_a_suspect_that_is_heard_of_again_is_none() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    cast.wait(9.0, beat=(b"w0", b"s0"))
    cast.beat(b"w1")
    cast.wait(9.0, beat=(b"w0", b"s0"))
    assert cast.core.phase is Phase.RUNNING
    assert len(cast.logs("warning")) == 2


@pytest.mark.parametrize("how", ["close", "silence", "leave", "abort"])
def test_c20_a_lost_server_is_named_with_its_address(how: str) -> None:
    cast = Cast(workers=2, servers=2)
    cast.start()
    if how == "close":
        cast.close(b"s1")
    elif how == "leave":
        cast.send(b"s1", Leave("SIGTERM"))
    elif how == "abort":
        cast.send(b"s1", Abort("out of memory"))
    cast.wait(1.0 if how != "silence" else 10.5, beat=(b"w0", b"w1", b"s0"))
    for peer in (b"w0", b"w1"):
        lost = failure(cast, peer)
        assert (lost.kind, lost.peer) == ("PeerLost", "server 1")
        assert "server 1 (host:pid 201, tcp://127.0.0.1:5201)" in lost.message
    cast.send(b"w0", Leave(""))
    cast.send(b"w1", Leave(""))
    assert cast.over() == [True]
    cast.clear()
    cast.send(b"t", hello("server", 9))
    for rank in range(2):
        cast.send(b"x%d" % rank, hello("worker", rank, job="next", pid=600 + rank))
    assert cast.last(b"t", PlanMessage).job == "next"


def test_c32_a_mismatch_reaches_every_rank_that_named_the_tensor_and_the_job_goes_on() -> None:
    cast = Cast(workers=3, servers=1)
    cast.start()
    cast.register(b"w0", 1, spec("x", 2, 3))
    cast.clear()
    cast.send(b"w1", Register(5, "", (spec("x", 3, 2),)))
    asker, other = cast.last(b"w1", Failed), cast.last(b"w0", Failed)
    assert (asker.req, other.req) == (5, 0)
    assert asker.kind == other.kind == "MismatchError"
    assert asker.tensor == other.tensor == "x"
    assert asker.message == other.message
    assert "rank 0: float32[2, 3]; rank 1: float32[3, 2]" in asker.message
    assert not cast.got(b"w2", Failed)
    cast.send(b"w1", Register(5, "", (spec("x", 3, 2),)))
    assert cast.last(b"w1", Failed) == asker, "asked again, told again"
    assert cast.register(b"w1", 6, spec("y", 4)) == (1,)
    assert cast.register(b"w0", 7, spec("y", 4)) == (1,)
    assert cast.core.phase is Phase.RUNNING


def test_different_sets_of_parameters_end_the_job_by_name() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    cast.register(b"w0", 1, spec("a"), spec("b"), group="opt0")
    cast.register(b"w1", 1, spec("a"), spec("c"), group="opt0")
    for peer in (b"w0", b"w1"):
        error = failure(cast, peer)
        assert error.kind == "MismatchError"
        assert "rank 0 lacks 'c'; rank 1 lacks 'b'" in error.message
    assert cast.core.phase is Phase.FAILED


def test_different_numbers_of_backward_passes_end_the_job() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    cast.register(b"w0", 1, spec("a", pack="opt0"))
    cast.send(b"w0", WindowReport("opt0", {0: 1}, (0,)))
    cast.send(b"w1", WindowReport("opt0", {0: 2}, (0,)))
    error = failure(cast, b"w1")
    assert "1 on rank 0, 2 on rank 1" in error.message
    assert "backward_passes_per_step" in error.hint


def test_c28_gathers_after_somebody_left_fail_and_joins_do_not() -> None:
    cast = Cast(workers=3, servers=1)
    cast.start()
    cast.send(b"w0", Gather(1, "barrier", 1, b""))
    cast.send(b"w2", Joined(4))
    cast.send(b"w1", Gather(1, "barrier", 1, b""))
    assert cast.last(b"w0", Gathered).values == {0: b"", 1: b""}
    cast.send(b"w0", Gather(2, "barrier", 2, b""))
    cast.send(b"w1", Leave("out of data"))
    error = cast.last(b"w0", Failed)
    assert (error.req, error.kind, error.peer) == (2, "PeerLost", "worker 1")
    assert "join()" in error.hint
    assert cast.core.phase is Phase.RUNNING


def test_e7_join_ends_when_all_have_joined_and_then_gathers_are_everybodys_again() -> None:
    cast = Cast(workers=3, servers=1)
    cast.start()
    cast.send(b"w2", Joined(4))
    cast.send(b"w0", Joined(5), Joined(5))
    assert not cast.got(b"w0", Gathered)
    cast.send(b"w1", Joined(6))
    answers = [cast.last(peer, Gathered) for peer in (b"w0", b"w1", b"w2")]
    assert answers == [Gathered(req, {1: b"last"}) for req in (5, 6, 4)]
    cast.clear()
    cast.send(b"w0", Gather(7, "after", 1, b"a"))
    cast.send(b"w1", Gather(7, "after", 1, b"b"))
    assert not cast.got(b"w0", Gathered), "rank 2 is awaited"
    cast.send(b"w2", Gather(7, "after", 1, b"c"))
    assert cast.last(b"w0", Gathered).values == {0: b"a", 1: b"b", 2: b"c"}
    cast.beat(b"w0")
    assert cast.inbox[b"w0"][-1].left == ()


def test_stop_tells_workers_and_servers() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    cast.step(Stop("SIGTERM"))
    for peer in (b"w0", b"w1"):
        assert "the coordinator was stopped by SIGTERM" in failure(cast, peer).message
    assert cast.last(b"s0", JobEnd).failed
    assert cast.over() == [True]
    assert cast.step(Stop("SIGTERM")) == []


def test_a_late_leave_is_answered_though_the_job_is_over() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    cast.send(b"w0", Leave(""))
    cast.clear()
    cast.send(b"w0", Leave(""))
    assert cast.got(b"w0", Left) == [Left(0)]
    assert not cast.got(b"w1", Left), "announced once"
    cast.send(b"w1", Leave(""))
    cast.clear()
    cast.send(b"w1", Leave(""))
    assert cast.last(b"w1", Left) == Left(1)
    assert cast.over() == []


def test_a_late_plan_ack_of_the_last_job_does_not_start_the_next() -> None:
    cast = Cast(workers=1, servers=2)
    cast.start()
    cast.send(b"w0", Leave(""))
    cast.send(b"x", hello("worker", 0, job="next", pid=5))
    cast.send(b"s0", PlanAck(1), PlanAck(2))
    cast.send(b"s1", PlanAck(1))
    assert not cast.got(b"x", PlanMessage)
    cast.send(b"s1", PlanAck(2))
    assert cast.last(b"x", PlanMessage).epoch == 2


def test_fetch_plan_brings_plan_and_table_from_a_place_on() -> None:
    cast = Cast(workers=1, servers=1)
    cast.start()
    cast.register(b"w0", 1, spec("a"), spec("b"), spec("c"))
    cast.clear()
    cast.send(b"w0", FetchPlan(1))
    assert cast.last(b"w0", PlanMessage).tokens == ()
    assert cast.last(b"w0", TableMessage) == TableMessage(1, (spec("b"), spec("c")))
    cast.send(b"s0", FetchPlan(0))
    assert cast.last(b"s0", PlanMessage).tokens == ((0, cast.tokens[b"w0"]),)
    assert len(cast.last(b"s0", TableMessage).specs) == 3


def test_c97_messages_of_strangers_and_of_the_wrong_kind_are_junk() -> None:
    cast = Cast(workers=1, servers=1)
    cast.start()
    cast.send(b"stranger", Gather(1, "t", 1, b""), PlanAck(1), JobEnd("job", True))
    cast.send(b"w0", JobEnd("job", True), Registered(1, ()), PlanAck(1))
    cast.send(b"s0", Gather(1, "t", 1, b""), Register(1, "", (spec("x"),)))
    assert len(cast.junk()) == 7
    assert cast.inbox == {}
    assert cast.core.phase is Phase.RUNNING


def test_counters_that_are_too_large_or_too_deep_are_left_out_of_the_status() -> None:
    cast = Cast(workers=1, servers=1)
    cast.start()
    deep: Any = 1
    for _ in range(600):
        deep = (deep,)
    for info in ({"x": deep}, {"x": "y" * 5000}):
        cast.send(b"w0", Heartbeat(cast.tokens[b"w0"], 0, 1, 0, b"", 0.0, info))
        cast.send(b"w0", StatusQuery(1))
        reply = cast.last(b"w0", StatusReply)
        assert reply.status["members"][0]["info"] == {}
        assert len(pack(reply.status)) < MAX_CONTROL


def test_the_status_of_a_thousand_members_fits_a_message() -> None:
    cast = Cast(workers=1000, servers=40)
    cast.start()
    for peer in cast.worker_peers:
        info = {"text": "x" * 2000}
        cast.send(peer, Heartbeat(cast.tokens[peer], 1, 1, 0, b"", 0.0, info))
    cast.send(b"w0", StatusQuery(1))
    assert len(CONTROL.encode(cast.last(b"w0", StatusReply))) < MAX_CONTROL


NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 7, (1 << 63) - 1, (1 << 64) - 1])
TEXTS = st.sampled_from(["", "t", "opt0", "opt1", "job", "other"])
COUNTS = st.dictionaries(NUMBERS, NUMBERS, max_size=3)
TOKENS = st.sampled_from([b"", b"token%011d" % 0, b"token%011d" % 1, b"token%011d" % 2])
SPECS = st.lists(
    st.one_of(
        st.builds(
            spec, st.sampled_from("abc"), st.integers(0, 2), pack=st.sampled_from(["", "opt0"])
        ),
        NUMBERS,
    ),
    max_size=3,
).map(tuple)
MESSAGES = st.one_of(
    st.builds(
        Hello, st.sampled_from([1, 1, 1, 2]), st.sampled_from(["worker", "server", "?"]), TEXTS,
        st.one_of(st.none(), NUMBERS), st.one_of(st.none(), NUMBERS), st.just("host"), NUMBERS,
        NUMBERS, TEXTS, TEXTS, TOKENS,
    ),
    st.builds(PlanAck, NUMBERS),
    st.builds(FetchPlan, NUMBERS),
    st.builds(Register, NUMBERS, TEXTS, SPECS, st.booleans()),
    st.builds(Gather, NUMBERS, TEXTS, NUMBERS, st.binary(max_size=2)),
    st.builds(WindowReport, TEXTS, COUNTS, st.lists(NUMBERS, max_size=3).map(tuple)),
    st.builds(
        Heartbeat, TOKENS, NUMBERS, NUMBERS, NUMBERS, st.just(b""), st.just(0.5), st.just({})
    ),
    st.builds(FenceAck, NUMBERS, st.booleans(), NUMBERS),
    st.builds(AtFence, NUMBERS, COUNTS),
    st.builds(Replan, NUMBERS, NUMBERS, NUMBERS),
    st.builds(Joined, NUMBERS),
    st.builds(Leave, TEXTS),
    st.builds(Abort, TEXTS),
    st.builds(StatusQuery, NUMBERS),
    st.builds(JobEnd, TEXTS, st.booleans()),
)  # fmt: skip
PEERS = st.sampled_from([b"w0", b"w1", b"s0", b"x"])
EVENTS = st.one_of(
    st.builds(Received, PEERS, MESSAGES),
    st.builds(Received, PEERS, MESSAGES),
    st.builds(Received, PEERS, MESSAGES),
    st.builds(Disconnected, PEERS),
    st.just(Tick()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.1, 1.0, 11.0])), max_size=40))
def test_whatever_comes_the_coordinator_lives_and_all_it_sends_can_be_read(
    events: list[tuple[Any, float]],
) -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    for event, pause in events:
        cast.now += pause
        for action in cast.step(event):
            if isinstance(action, Send):
                data = CONTROL.encode(action.message)
                assert type(CONTROL.decode(data)) is type(action.message)
    cast.step(Stop("SIGTERM"))
    assert cast.core.phase is Phase.IDLE
    cast.send(b"new server", hello("server", 700))
    for rank, peer in enumerate((b"y0", b"y1")):
        cast.send(peer, hello("worker", rank, job="after", pid=800 + rank))
    assert cast.last(b"y0", Welcome).rank == 0, "still at work"
    assert cast.last(b"y1", Welcome).rank == 1


def test_i1_a_member_with_another_table_ends_the_job_by_name() -> None:
    cast = Cast(workers=2, servers=1)
    cast.start()
    cast.register(b"w0", 1, spec("a", 8))
    other = digest(spec("a", 9))
    cast.send(b"w1", Heartbeat(cast.tokens[b"w1"], 0, 1, 1, other, 0.0, {}))
    failure = cast.last(b"w0", Failed)
    assert (failure.req, failure.kind, failure.tensor) == (0, "ProtocolError", "")
    assert "worker 1 holds another tensor table" in failure.message
