"""What a job changes by itself when links are unequal: shares of servers, by planned epochs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gradsum.proto.control import Fence, Heartbeat, PlanMessage
from gradsum.scheduler.adaptation import LASTING, REST
from gradsum.scheduler.placement import shares, weights

from .cast import Cast, hello, spec

MB = 1e6
HOSTS = ("a", "b", "c")


class Job:
    """Three workers on machines a to c with a server each, and CPU machines x and y."""

    def __init__(self, **config: Any) -> None:
        self.cast = Cast(workers=3, servers=5, **config)
        for index, (peer, host) in enumerate(zip(self.cast.server_peers, "abcxy", strict=True)):
            self.cast.send(peer, hello("server", index, host=host))
        for rank, (peer, host) in enumerate(zip(self.cast.worker_peers, "abc", strict=True)):
            self.cast.send(peer, hello("worker", rank, host=host))
        self.cast.acknowledge()
        for peer in self.cast.worker_peers:
            self.cast.register(peer, 1, spec("a", 4))
        self.step = 0
        self.cast.clear()

    def beat(self, **capacities: Any) -> None:
        """Heartbeats of everybody, with the capacity of the host's link; 0: not measured."""
        self.step += 1
        self.cast.now += 0.5
        peers = [*self.cast.server_peers, *self.cast.worker_peers]
        for peer, host in zip(peers, "abcxyabc", strict=True):
            info = {"uplink": capacities[host], "capacity": capacities[host]}
            step = self.step if peer.startswith(b"w") else 0
            beat = Heartbeat(self.cast.tokens[peer], step, 1, 0, b"", 0.0, info)
            self.cast.send(peer, beat)

    def last(self, seconds: float, **capacities: Any) -> None:
        """The same for some time."""
        for _ in range(int(seconds / 0.5) + 1):
            self.beat(**capacities)

    def fences(self) -> int:
        return len(self.cast.got(b"w0", Fence))

    def plan(self) -> PlanMessage:
        """All pass the fence that was asked for; what they go on with."""
        plan = self.cast.pass_fence(self.step)
        self.step = plan.step
        self.cast.clear()
        return plan


EQUAL = dict.fromkeys("abcxy", 50 * MB)


def test_shares_follow_the_links_that_were_measured() -> None:
    job = Job()
    job.last(LASTING, **EQUAL | {"x": 12.5 * MB, "y": 12.5 * MB})
    assert any("shares by the links" in text for text in job.cast.logs("info"))
    plan = job.plan()
    own, cpu = shares([50.0] * 3, [12.5, 12.5])
    assert tuple(s.weight for s in plan.servers) == pytest.approx((*own, *cpu))
    assert plan.servers[0].weight == pytest.approx(own[0])
    assert own[0] > 2 * cpu[0]


def test_a_link_that_changes_moves_them_again_after_a_rest() -> None:
    job = Job()
    job.last(LASTING, **EQUAL | {"x": 2 * MB, "y": 2 * MB})
    assert job.plan().servers[0].weight > 0.3
    job.last(REST - 1, **EQUAL)
    assert job.fences() == 0
    job.last(LASTING + 1, **EQUAL)
    assert job.fences() >= 1
    assert tuple(s.weight for s in job.plan().servers) == pytest.approx(weights("abc", "abcxy"))


def test_noise_moves_nothing() -> None:
    job = Job()
    for number in range(40):
        low = "abcxy"[number % 5]
        job.beat(**{host: (46 if host == low else 51) * MB for host in "abcxy"})
    for number in range(40):
        job.beat(**EQUAL | {"x": (5 if number % 8 else 50) * MB})  # never for long
    assert job.fences() == 0


def test_nothing_moves_before_everybody_who_carries_bytes_has_measured() -> None:
    slow = EQUAL | {"x": 12.5 * MB, "y": 12.5 * MB}
    for host in "abcxy":
        job = Job()
        job.last(LASTING + 1, **slow | {host: 0.0})
        assert job.fences() == 0
        job.last(LASTING, **slow)
        assert job.fences() >= 1


@pytest.mark.parametrize("capacity", [math.nan, math.inf, -1.0, "fast", 7])
def test_a_capacity_that_is_none_counts_as_not_measured(capacity: Any) -> None:
    job = Job()
    job.last(LASTING + 1, **EQUAL | {"y": 2 * MB, "x": capacity})
    assert job.fences() == 0
