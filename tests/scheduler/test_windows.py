"""Hook firings (V4) and the packing order (E8)."""

from __future__ import annotations

import pytest

from gradsum.errors import MismatchError
from gradsum.proto.control import Firings, WindowReport
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import Table, TensorSpec
from gradsum.scheduler.windows import Windows, worth_packing

from .cast import spec


def table_of(*specs: TensorSpec) -> Table:
    table = Table()
    for one in specs:
        table.append(one)
    return table


@pytest.fixture
def table() -> Table:
    return table_of(*(spec(name, 4, pack="opt0") for name in "abcd"), spec("raw", 4))


def test_nothing_is_known_before_all_have_reported(table: Table) -> None:
    windows = Windows(table)
    assert windows.add(1, WindowReport("opt0", {0: 1}, (0,))) is None
    assert windows.settle({0, 1}) == []
    assert windows.order == ()


def test_none_against_some_is_legal_and_merged(table: Table) -> None:
    windows = Windows(table)
    windows.add(0, WindowReport("opt0", {0: 2, 1: 0}, (0,)))
    windows.add(1, WindowReport("opt0", {1: 2, 2: 0}, (1,)))
    assert windows.settle({0, 1}) == [Firings("opt0", {0: 2, 1: 2, 2: 0})]
    assert windows.settle({0, 1}) == []
    again = windows.add(1, WindowReport("opt0", {1: 2, 2: 0}, (1,)))
    assert again == Firings("opt0", {0: 2, 1: 2, 2: 0})


def test_c29_two_different_counts_are_an_error_with_the_numbers_of_each_rank(table: Table) -> None:
    windows = Windows(table)
    windows.add(0, WindowReport("opt0", {0: 2, 1: 1}, (0, 1)))
    windows.add(1, WindowReport("opt0", {0: 2, 1: 3}, (0, 1)))
    windows.add(2, WindowReport("opt0", {0: 2, 1: 0}, (0, 1)))
    [error] = windows.settle({0, 1, 2})
    assert isinstance(error, MismatchError)
    assert error.tensor == "b"
    assert "1 on rank 0, 3 on rank 1, 0 on rank 2" in error.message
    assert error.hint is not None and "backward_passes_per_step" in error.hint


def test_order_is_the_lowest_ranks_then_missing_keys_and_never_unpacked_ones(table: Table) -> None:
    windows = Windows(table)
    windows.add(2, WindowReport("opt0", {0: 1, 2: 1}, (0, 2)))
    windows.add(1, WindowReport("opt0", {3: 1, 2: 1, 4: 1}, (3, 4, 2, 3)))
    windows.settle({1, 2})
    assert windows.order == (3, 2, 0, 1)


def test_orders_of_groups_follow_one_another_as_they_complete() -> None:
    table = table_of(spec("a", pack="opt0"), spec("b", pack="opt1"), spec("c", pack="opt1"))
    windows = Windows(table)
    windows.add(0, WindowReport("opt0", {0: 1}, (0,)))
    windows.add(0, WindowReport("opt1", {1: 1, 2: 1}, (2, 1)))
    windows.add(1, WindowReport("opt1", {1: 1, 2: 1}, (1, 2)))
    windows.settle({0, 1})
    assert list(windows.order) == [2, 1]
    windows.add(1, WindowReport("opt0", {0: 1}, (0,)))
    windows.settle({0, 1})
    assert list(windows.order) == [2, 1, 0]


def test_a_rank_that_goes_is_waited_for_no_longer(table: Table) -> None:
    windows = Windows(table)
    windows.add(0, WindowReport("opt0", {0: 1}, (0,)))
    assert windows.settle({0, 1}) == []
    assert windows.settle({0}) == [Firings("opt0", {0: 1})]


def test_reports_with_unknown_keys_are_recognised(table: Table) -> None:
    windows = Windows(table)
    assert windows.knows(WindowReport("opt0", {4: 1}, (4,)))
    assert not windows.knows(WindowReport("opt0", {5: 1}, ()))
    assert not windows.knows(WindowReport("opt0", {}, (-1,)))


@pytest.mark.parametrize(
    ("specs", "worth"),
    [
        ([spec("a", 4, pack="o"), spec("b", 4, pack="o")], True),
        ([spec("a", 4, pack="o"), spec("b", 4, pack="p")], False),  # two optimizers
        ([spec("a", 4, pack="o"), spec("b", 4, pack="o", dtype="float64")], False),
        ([spec("a", 4), spec("b", 4)], False),  # pushed singly
        ([spec("a", 4, pack="o"), spec("b", 25, pack="o")], False),  # one is too large
        ([spec("a", 4, pack="o"), spec("b", 0, pack="o")], False),  # one has no elements
    ],
)
def test_packing_needs_two_small_tensors_of_one_kind(specs: list[TensorSpec], worth: bool) -> None:
    table = table_of(*specs)
    assert worth_packing(table, (0, 1), 100) is worth
    assert worth_packing(table, (0, 1), 0) is False
    assert Policy().pack == ""
