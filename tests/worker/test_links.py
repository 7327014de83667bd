"""Links: generations, heartbeats, grants, lost pushes, and joining everywhere."""

from __future__ import annotations

from typing import Any

from gradsum.proto import peer
from gradsum.scheduler.credit import Bounds
from gradsum.worker.links import BATCH, Links
from gradsum.worker.rounds import Flight
from tests.sim.build import plan
from tests.worker.test_timers import flight

BEAT = 0.5


def links(servers: int = 1, now: float = 10.0) -> Links:
    """Connected and attached at ``now``, first records already sent."""
    result = Links(peer.Attach(b"secret", "", b""), Bounds(1_000), BEAT)
    result.adopt(plan(servers=servers), now)
    for server in range(servers):
        result.connected(server, 1, False, now)
        result.attached(server, 1)
    result.drain(now)
    return result


def kinds(records: dict[int, list[Any]], server: int = 0) -> list[str]:
    return [type(record).__name__ for record in records.get(server, [])]


def test_a_plan_may_come_before_the_sockets() -> None:
    one = Links(peer.Attach(b"secret", "", b""), Bounds(1_000), BEAT)
    one.adopt(plan(servers=2), 10.0)
    one.tell(1, peer.Pull(0, 0, 1))
    assert one.drain(99.0) == {}
    assert list(one.stale(99.0)) == []
    assert one.next_deadline() == float("inf")
    one.connected(1, 1, False, 99.0)
    assert kinds(one.drain(99.0), 1) == ["Attach", "Credit"]


def test_attach_is_repeated_with_each_heartbeat_until_attached_and_leads() -> None:
    one = Links(peer.Attach(b"secret", "", b""), Bounds(1_000), BEAT)
    one.connected(0, 1, False, 10.0)
    assert one.drain(10.0)[0] == [peer.Attach(b"secret", "", b""), peer.Credit(1, 0, 1_000, 1_000)]
    assert list(one.stale(10.4)) == []
    assert one.drain(10.4) == {}
    assert list(one.stale(10.6)) == [0]
    one.tell(0, peer.Pull(0, 0, 1))
    assert kinds(one.drain(10.6)) == ["Attach", "Pull", "Ping", "Credit"]
    one.attached(0, 1)
    assert list(one.stale(11.2)) == []
    assert kinds(one.drain(11.2)) == ["Ping", "Credit"]


def test_news_of_an_older_generation_attaches_nothing() -> None:
    one = links()
    one.connected(0, 2, False, 10.0)
    one.attached(0, 1)
    assert list(one.stale(10.6)) == [0]


def test_a_new_connection_starts_credit_anew_and_returns_what_was_lost() -> None:
    one, lost = links(), flight()
    one.arrived(0, 1, 700, 10.0)
    one.sent(0, 5, lost, 10.0)
    assert one.connected(0, 2, False, 10.1) == [lost]
    assert one.generation(0) == 2
    assert not one.arrived(0, 1, 900, 10.1)  # of the old connection
    assert one.arrived(0, 2, 100, 10.1)
    assert peer.Credit(2, 100, 1_100, 1_100) in one.drain(10.7)[0]


def test_a_stranger_asks_for_one_new_connection() -> None:
    one = links()
    assert one.strange(0)
    assert not one.strange(0)
    one.connected(0, 2, False, 10.0)
    assert not one.strange(0)  # not attached yet: the server cannot know us
    one.attached(0, 2)
    assert one.strange(0)


def test_grants_are_told_when_they_are_news() -> None:
    one = links()
    one.arrived(0, 1, 120, 10.1)
    assert one.drain(10.1) == {}
    one.arrived(0, 1, 300, 10.1)
    assert one.drain(10.1) == {0: [peer.Credit(1, 300, 1_300, 1_300)]}
    assert one.drain(10.1) == {}


def test_an_envelope_has_room_for_so_many_records_and_the_rest_goes_at_once() -> None:
    one = links()
    for number in range(BATCH + 10):
        one.tell(0, peer.Pull(number, 0, 1))
    assert one.next_deadline() == 10.5
    assert len(one.drain(10.1)[0]) == BATCH
    assert one.next_deadline() == 0.0
    assert len(one.drain(10.1)[0]) == 10
    assert one.next_deadline() == 10.5


def test_f3_a_receipt_shows_which_pushes_must_be_lost() -> None:
    one = links()
    sent: dict[int, Flight] = {number: flight() for number in range(1, 7)}
    for number, each in sent.items():
        one.sent(0, number, each, 10.0)
    one.settle(0, 5)
    assert one.overtaken(0, 5) == [sent[1], sent[2]]
    assert one.overtaken(0, 5) == []


def test_silent_servers_are_named() -> None:
    one = links(servers=2)
    one.heard(0, 14.0)
    assert one.silent(14.0, 3.0) == [(1, 4.0, True)]
    one.connected(1, 2, False, 14.0)
    assert one.silent(16.0, 3.0) == []


def test_e7_standing_is_repeated_until_every_server_has_seen_it() -> None:
    one = links(servers=2)
    one.join()
    assert not one.joined_everywhere()
    first = one.drain(10.1)
    assert "Standing" in kinds(first, 0) and "Standing" in kinds(first, 1)
    one.standing_seen(0)
    again = one.drain(10.7)
    assert "Standing" not in kinds(again, 0) and "Standing" in kinds(again, 1)
    one.standing_seen(1)
    assert one.joined_everywhere()
    one.connected(1, 2, False, 11.0)  # a new connection may lead to a server that forgot
    assert not one.joined_everywhere()


def test_timeouts_are_measured_per_server() -> None:
    one = links(servers=2)
    one.sent(0, 1, flight(), 10.0)
    one.measured(0, 1, 10.5)
    assert one.timeout(0) != one.timeout(1)


def test_each_transmission_is_measured_on_its_own() -> None:
    """Karn: the receipt of a repeat says nothing of the first copy, and the other way round."""
    one = links()
    for _ in range(40):
        one.sent(0, 1, flight(), 10.0)
        one.sent(0, 2, flight(), 14.0)
        one.measured(0, 1, 15.0)
        one.measured(0, 2, 19.0)
        one.measured(0, 2, 99.0)  # a second receipt
    assert 4.9 < one.timeout(0) < 5.5
