"""The split between co-located and CPU machines (DESIGN 6)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.scheduler.placement import seconds, shares, weights


def split(machines: int, extra: int) -> tuple[float, float]:
    """What one machine of each kind carries when links are equal."""
    own, cpu = shares([1.0] * machines, [1.0] * extra)
    assert own == pytest.approx((own[0],) * machines)
    assert cpu == pytest.approx((cpu[0],) * extra if extra else ())
    return own[0], cpu[0] if extra else 2 * (machines - 1) / machines**2


@pytest.mark.parametrize(
    ("machines", "extra", "expected"),
    [
        (1, 0, (1.0, 0.0)),  # all on one machine
        (1, 1, (0.0, 1.0)),  # one worker machine: the CPU machines if any
        (1, 3, (0.0, 1 / 3)),
        (4, 0, (1 / 4, 6 / 16)),  # no CPU machine: an all-reduce
        (4, 4, (0.0, 1 / 4)),  # a pure parameter server
        (4, 2, (2 / 20, 6 / 20)),
        (2, 1, (1 / 4, 2 / 4)),
        (2, 5, (0.0, 1 / 5)),  # more CPU machines than workers
    ],
)
def test_split_follows_the_closed_formula(
    machines: int, extra: int, expected: tuple[float, float]
) -> None:
    assert split(machines, extra) == pytest.approx(expected)


@given(st.integers(2, 40), st.integers(0, 40))
def test_shares_of_all_machines_sum_to_one(machines: int, extra: int) -> None:
    colocated, cpu = split(machines, extra)
    assert machines * colocated + extra * cpu == pytest.approx(1.0)
    assert colocated >= 0 and cpu >= 0


@given(st.integers(2, 12), st.integers(0, 12))
def test_no_split_of_the_same_kind_is_faster(machines: int, extra: int) -> None:
    """The slowest link decides: a co-located server's machine also carries its worker's traffic."""
    if extra > machines:
        return
    colocated, cpu = split(machines, extra)

    def slowest(own: float, other: float) -> float:
        worker = 1 - own + own * (machines - 1)  # pushes what is elsewhere, sums for the others
        return max(worker, other * machines if extra else 0.0)

    best = slowest(colocated, cpu)
    for step in range(1, 100):
        own = step / 100 / machines
        other = (1 - machines * own) / extra if extra else 0.0
        assert best <= slowest(own, other) + 1e-9 or (extra == 0 and own < colocated)


def test_servers_of_one_machine_share_its_weight() -> None:
    hosts = ["a", "a", "b", "cpu", "cpu"]
    got = weights(["a", "b", "a"], hosts)
    colocated, cpu = split(2, 1)
    assert got == pytest.approx((colocated / 2, colocated / 2, colocated, cpu / 2, cpu / 2))


def test_everything_on_one_host_is_dealt_equally() -> None:
    assert weights(["a", "a"], ["a", "a", "a", "a"]) == (0.25,) * 4


def test_co_located_servers_of_a_pure_parameter_server_carry_nothing() -> None:
    assert weights(["a", "b"], ["a", "b", "c", "d"]) == (0.0, 0.0, 0.5, 0.5)


@given(
    st.lists(st.sampled_from("abcde"), min_size=1), st.lists(st.sampled_from("abcxyz"), min_size=1)
)
def test_weights_are_a_distribution(workers: list[str], servers: list[str]) -> None:
    got = weights(workers, servers)
    assert len(got) == len(servers)
    assert min(got) >= 0
    assert sum(got) == pytest.approx(1.0)


RATES = st.lists(st.floats(1.0, 100.0), min_size=2, max_size=6)


@given(RATES, st.lists(st.floats(1.0, 100.0), max_size=4), st.data())
def test_no_other_parts_are_faster_with_unequal_links(
    workers: list[float], extras: list[float], data: st.DataObject
) -> None:
    own, cpu = shares(workers, extras)
    assert min(*own, *cpu, 0.0) == 0.0 and sum(own) + sum(cpu) == pytest.approx(1.0)
    best = seconds(workers, extras, (*own, *cpu))
    count = len(workers) + len(extras)
    raw = data.draw(st.lists(st.floats(0.0, 1.0), min_size=count, max_size=count))
    if sum(raw) < 1e-6:
        return
    other = [part / sum(raw) for part in raw]
    assert best <= seconds(workers, extras, other) * (1 + 1e-9)
    near = [0.98 * a + 0.02 * b for a, b in zip((*own, *cpu), other, strict=True)]
    assert best <= seconds(workers, extras, near) * (1 + 1e-9)


def test_a_slow_machine_carries_less() -> None:
    """Four workers without CPU machines, one with a fifth of the others' link."""
    own, _ = shares([100.0, 500.0, 500.0, 500.0], [])
    assert own[0] == pytest.approx(0.0) and own[1] == own[2] == own[3]
    own, cpu = shares([500.0] * 4, [500.0, 250.0])
    assert cpu[0] == pytest.approx(2 * cpu[1]) and cpu[1] > own[0]
    assert seconds([500.0] * 4, [500.0, 250.0], (*own, *cpu)) < seconds(
        [500.0] * 4, [500.0, 250.0], weights("abcd", "abcdxy")
    )


def test_rates_are_of_hosts() -> None:
    rates = {"a": 1.0, "b": 1.0, "c": 1.0, "x": 2.0}
    own, cpu = shares([1.0, 1.0, 1.0], [2.0])
    assert weights("abca", "abxcx", rates) == pytest.approx(
        (own[0], own[1], cpu[0] / 2, own[2], cpu[0] / 2)
    )
