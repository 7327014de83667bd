"""The server's conversation with the coordinator: messages in, events and answers out."""

from __future__ import annotations

import pytest

from gradsum.errors import Refused, Unreachable
from gradsum.proto import control
from gradsum.proto.control import PlanMessage, ServerInfo
from gradsum.proto.limits import PROTOCOL
from gradsum.server.events import Adopt, Extend, Reset
from gradsum.server.membership import Membership

HELLO = control.Hello(
    PROTOCOL, "server", "", None, None, "host", 1, 0, "tcp://h:1", "tcp://h:2", b""
)
WELCOME = control.Welcome("c1", 3, 2, 7, b"token", 0.5, 10.0)


def plan(coordinator: str = "c1", number: int = 3, incarnation: int = 7) -> PlanMessage:
    servers = (ServerInfo(0, 5, "", "", 1.0), ServerInfo(number, incarnation, "", "", 1.0))
    return PlanMessage(
        coordinator, "job", 1, ((0, 8),), servers, 1, 0, (), 0, 0, 0, (), False, ()
    )


def member(once: bool = False, welcome: bool = True) -> Membership:
    found = Membership(HELLO, "h:9", 30.0, once, 0.0)
    assert found.outbox == [HELLO]
    found.outbox.clear()
    if welcome:
        found.received(WELCOME, 0, 0, 0.0)
    return found


def beat(found: Membership, now: float) -> list[object]:
    found.outbox.clear()
    found.tick(now, 0, 0, b"", {})
    return list(found.outbox)


def test_hello_is_repeated_until_welcome_and_then_beats_carry_the_token() -> None:
    found = member(welcome=False)
    assert beat(found, 0.5) == []
    assert beat(found, 1.0) == [HELLO]
    found.received(WELCOME, 0, 0, 1.5)
    (sent,) = beat(found, 2.0)
    assert isinstance(sent, control.Heartbeat)
    assert sent.token == b"token"


def test_i4_a_plan_is_served_only_if_it_names_this_incarnation() -> None:
    found = member()
    found.received(plan(incarnation=6), 0, 0, 1.0)
    found.received(plan(number=4), 0, 0, 1.0)
    assert not found.events
    assert not found.outbox
    found.received(plan(), 0, 0, 1.0)
    (event,) = found.events
    assert isinstance(event, Adopt)
    assert event.index == 1
    assert found.outbox == [control.PlanAck(1)]


def test_e9_plans_of_another_coordinator_are_not_taken() -> None:
    found = member()
    found.received(plan(coordinator="c2"), 0, 0, 1.0)
    assert not found.events


def test_a_table_is_passed_on_and_a_lag_is_fetched() -> None:
    found = member()
    found.received(control.TableMessage(4, ()), 0, 4, 1.0)
    assert found.events == [Extend(4, ())]
    found.outbox.clear()
    found.received(control.HeartbeatReply(1, 9, 0, ()), 1, 4, 1.0)
    found.received(control.HeartbeatReply(1, 9, 0, ()), 1, 4, 1.1)
    assert found.outbox == [control.FetchPlan(4)]
    found.received(control.HeartbeatReply(1, 9, 0, ()), 1, 4, 1.3)
    assert found.outbox == [control.FetchPlan(4)] * 2


def test_the_end_of_a_job_drops_its_state() -> None:
    found = member()
    found.received(control.JobEnd("job", True), 1, 4, 1.0)
    assert found.events == [Reset()]
    assert found.over == control.JobEnd("job", True)


def test_a_refused_server_ends_and_a_forgotten_one_says_hello_again() -> None:
    with pytest.raises(Refused, match="no room"):
        member(welcome=False).received(control.Refusal("no room", "go"), 0, 0, 1.0)
    found = member()
    found.received(control.Refusal("unknown member", ""), 0, 0, 1.0)
    assert found.events == [Reset()]
    assert beat(found, 2.0) == [HELLO]


def test_silence_ends_a_server_of_one_job_and_makes_a_standing_one_wait() -> None:
    with pytest.raises(Unreachable, match="h:9 does not answer"):
        beat(member(welcome=False), 31.0)
    with pytest.raises(Unreachable, match="silent for 11.0 s"):
        beat(member(once=True), 11.0)
    found = member()
    beat(found, 11.0)
    assert found.events == [Reset()]
    assert beat(found, 1e6) == [HELLO]
