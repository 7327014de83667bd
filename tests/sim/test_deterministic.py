"""S6: with ``deterministic`` the bits do not depend on who arrives when, nor on the park budget."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from gradsum.proto import peer
from gradsum.scheduler.table import TensorSpec
from gradsum.worker.rounds import Op
from tests.sim.build import OneServer, spec
from tests.sim.cluster import Cluster
from tests.sim.oracle import Array, Box, Oracle
from tests.sim.program import Rank
from tests.sim.workload import Job, draw

RANKS = 4
ELEMENTS = 33


def contributions(seed: int, wire: str = "float32") -> list[bytes]:
    """Numbers of very different sizes, so that the order of adding shows in the last bits."""
    rng = np.random.default_rng(seed)
    size = (RANKS, ELEMENTS)
    wide = rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4, size)
    return [row.astype(wire).tobytes() for row in wide]


def summed(order: tuple[int, ...], park: int, deterministic: bool = True) -> tuple[bytes, int]:
    """The sum when ranks push in this order, again on RESEND; and how many were put off."""
    server = OneServer(
        spec(elements=ELEMENTS), workers=RANKS, park=park, deterministic=deterministic
    )
    payloads = contributions(7)
    put_off = 0
    for rank in order:
        server.push(rank, 1, bytearray(payloads[rank]))
    for _ in range(RANKS):
        for rank in range(RANKS):
            put_off += len(server.heard(rank, peer.Later))
            again = server.heard(rank, peer.Resend)
            server.told[rank].clear()
            for _ in again:
                server.push(rank, 1, bytearray(payloads[rank]))
    assert server.engine._parking.used == 0
    return bytes(server.sums[0].payload), put_off


@pytest.mark.parametrize("park", [0, ELEMENTS * 4, 1 << 20])
def test_s6_same_bits_for_every_arrival_order(park: int) -> None:
    orders = list(itertools.permutations(range(RANKS)))
    results = [summed(order, park) for order in orders]
    assert len({bits for bits, _ in results}) == 1
    first, *others = (np.frombuffer(p, np.float32) for p in contributions(7))
    want = first.copy()
    for other in others:
        want += other
    assert results[0][0] == want.tobytes()
    put_off = sum(count for _, count in results)
    assert (put_off == 0) == (park == 1 << 20)


def test_s6_without_it_the_order_does_show() -> None:
    """The data is able to tell orders apart, so the test above says something."""
    orders = itertools.permutations(range(RANKS))
    assert len({summed(order, 0, deterministic=False)[0] for order in orders}) > 1


def test_s6_half_types_too() -> None:
    results = set()
    payloads = contributions(3, "float16")
    for order in itertools.permutations(range(RANKS)):
        server = OneServer(
            spec(elements=ELEMENTS, wire="float16"), workers=RANKS, deterministic=True
        )
        for rank in order:
            server.push(rank, 1, bytearray(payloads[rank]), wire="float16")
        results.add((bytes(server.sums[0].payload), server.sums[0].header.exponent))
    assert len(results) == 1


class Bits(Oracle):
    """Keeps what every rank received instead of judging it."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.seen: dict[tuple[int, int], set[bytes]] = {}

    def judge(self, rank: int, op: Op, one: TensorSpec, pushed: object) -> None:
        if isinstance(op.sink, Box) and op.present:
            self.seen.setdefault((op.key, op.version), set()).add(op.sink.values.tobytes())


def bits(job: Job, network: int, patch: pytest.MonkeyPatch) -> dict[tuple[int, int], set[bytes]]:
    """Everything received in a run of ``job`` over another bad network."""

    def payload(one: TensorSpec, key: int, rank: int, version: int) -> Array:
        rng = np.random.default_rng((key, rank, version))
        wide = rng.standard_normal(one.elements) * 10.0 ** rng.integers(-2, 6, one.elements)
        return wide.astype(one.wire)

    patch.setattr("tests.sim.program.payload", payload)
    cluster = Cluster(dataclasses.replace(job, seed=network))
    oracle = cluster.oracle = Bits(job.workers)
    for rank in cluster.ranks:
        assert isinstance(rank, Rank)
        rank.oracle = oracle
    cluster.run()
    return {name: seen for name, seen in oracle.seen.items() if name[0] < len(job.early)}


@pytest.mark.parametrize("seed", [3, 8, 21])
def test_s6_same_bits_over_any_network(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost, repeated and late messages, small budgets: the same bits on every rank of every run."""
    job = dataclasses.replace(
        draw(seed), workers=4, last=(3,) * 4, deterministic=True,
        park=random.Random(seed).choice((0, 64, 100_000)), fences=(), late=[],
    )  # fmt: skip
    runs = [bits(job, network, monkeypatch) for network in range(6)]
    assert runs[0]
    assert all(len(received) == 1 for received in runs[0].values())
    assert all(run == runs[0] for run in runs)
