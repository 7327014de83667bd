"""Names, keys, mismatches and sets of names (I1)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.errors import MismatchError, NotBuilt, ProtocolError
from gradsum.proto.codec import pack
from gradsum.proto.limits import MAX_CONTROL
from gradsum.scheduler.registry import Accepted, Registry, Rejected, pages
from gradsum.scheduler.table import Table, TensorSpec

from .cast import spec

MANY = 10**6


def accepted(result: Accepted | Rejected) -> Accepted:
    assert isinstance(result, Accepted), result
    return result


def rejected(result: Accepted | Rejected) -> Rejected:
    assert isinstance(result, Rejected), result
    return result


def test_equal_specs_share_a_key_in_the_order_of_the_request() -> None:
    registry = Registry(MANY, 0)
    assert accepted(registry.register(0, "", [spec("a", 2), spec("b", 3)])) == Accepted((0, 1), 0)
    assert accepted(registry.register(1, "", [spec("c"), spec("b", 3)])) == Accepted((2, 1), 2)
    assert registry.nbytes == 4 * (2 + 3 + 1)
    assert registry.missing("b", {0, 1, 2}) == [2]
    assert registry.unnamed({0, 1}, 5) == {"a": [1], "c": [0]}


@pytest.mark.parametrize(
    ("mine", "theirs", "sides"),
    [
        (spec("x", 2, 3), spec("x", 3, 2), ("float32[2, 3]", "float32[3, 2]")),
        (spec("x", 6), spec("x", 6, dtype="bfloat16"), ("float32[6]", "bfloat16[6]")),
        (spec("x", 6), spec("x", 7), ("float32[6]", "float32[7]")),
        (spec("x", 6), spec("x", 6, first=4), ("from version 1", "from version 4")),
        (spec("x", 6), spec("x", 6, pack="opt0"), ("pack=''", "pack='opt0'")),
    ],
)
def test_c32_a_mismatch_names_the_tensor_and_both_sides(
    mine: TensorSpec, theirs: TensorSpec, sides: tuple[str, str]
) -> None:
    registry = Registry(MANY, 0)
    accepted(registry.register(0, "", [mine]))
    result = rejected(registry.register(1, "", [spec("fine", 1), theirs]))
    assert isinstance(result.error, MismatchError)
    assert result.error.tensor == "x"
    assert result.others == (0,)
    text = result.error.message
    assert "'x'" in text
    assert text.index("rank 0: ") < text.index(sides[0]) < text.index("rank 1: ")
    assert sides[1] in text
    assert registry.table.key("fine") is None, "a request is taken whole or not at all"


def test_a_mismatch_lists_all_ranks_of_each_side() -> None:
    registry = Registry(MANY, 0)
    for rank in (0, 1, 3):
        accepted(registry.register(rank, "", [spec("x", 2)]))
    rejected(registry.register(2, "", [spec("x", 5)]))
    result = rejected(registry.register(4, "", [spec("x", 5)]))
    assert "ranks 0-1, 3: float32[2]; ranks 2, 4: float32[5]" in result.error.message
    assert result.others == (0, 1, 2, 3)


def test_c32_a_dispute_reaches_ranks_that_come_later_and_has_no_way_back() -> None:
    registry = Registry(MANY, 0)
    accepted(registry.register(0, "", [spec("x", 2)]))
    rejected(registry.register(1, "", [spec("x", 5)]))
    result = rejected(registry.register(2, "", [spec("x", 2)]))
    assert "ranks 0, 2: float32[2]; rank 1: float32[5]" in result.error.message
    result = rejected(registry.register(1, "", [spec("x", 2)]))
    assert "ranks 0, 2: float32[2]; rank 1: float32[5]" in result.error.message, "as it was"
    accepted(registry.register(1, "", [spec("y", 2)]))


def test_a_rank_that_contradicts_itself_is_told_so() -> None:
    registry = Registry(MANY, 0)
    accepted(registry.register(0, "", [spec("x", 2)]))
    error = rejected(registry.register(0, "", [spec("x", 5)])).error
    assert "rank 0: float32[2] before; rank 0: float32[5] now" in error.message


def test_one_request_that_names_a_tensor_twice() -> None:
    registry = Registry(MANY, 0)
    assert accepted(registry.register(0, "", [spec("x", 2), spec("x", 2)])).keys == (0, 0)
    error = rejected(registry.register(0, "", [spec("y", 2), spec("y", 3)])).error
    assert "named twice" in error.message and error.tensor == "y"


def test_values_of_later_releases_and_nonsense_are_refused() -> None:
    registry = Registry(MANY, 0)
    later = spec("x")._replace(policy=spec("x").policy._replace(slack=2))
    assert isinstance(rejected(registry.register(0, "", [later])).error, NotBuilt)
    for raw in (7, ("x",), spec("", 1), spec("x", -1), spec("x", dtype="bool")):
        assert isinstance(rejected(registry.register(0, "", [raw])).error, ProtocolError)
    assert len(registry.table) == 0


def test_caps_say_what_is_needed_and_what_there_is() -> None:
    registry = Registry(3, 100)
    accepted(registry.register(0, "", [spec("a", 20)]))
    error = rejected(registry.register(0, "", [spec("b", 6)])).error
    assert "needs 104, have 100" in error.message and error.tensor == "b"
    error = rejected(registry.register(0, "", [spec(f"c{i}", 0) for i in range(3)])).error
    assert "needs 4, have 3" in error.message
    accepted(registry.register(1, "", [spec("a", 20)]))
    assert accepted(registry.register(0, "", [spec("b", 5)])).keys == (1,)


def test_sets_that_differ_are_shown_by_name_on_both_sides() -> None:
    registry = Registry(MANY, 0)
    both = [spec(f"p{i}") for i in range(3)]
    accepted(registry.register(0, "opt0", [*both, *(spec(f"extra{i}") for i in range(7))]))
    assert registry.compare({0, 1}) is None, "rank 1 has not registered yet"
    accepted(registry.register(1, "opt0", [*both, spec("mine")]))
    error = registry.compare({0, 1})
    assert error is not None
    assert error.tensor == "extra0"
    assert "rank 0 lacks 'mine'" in error.message
    assert "rank 1 lacks 'extra0', 'extra1', 'extra2', 'extra3', 'extra4' and 2 more" in (
        error.message
    )


def test_c40_sets_are_compared_turn_by_turn() -> None:
    registry = Registry(MANY, 0)
    accepted(registry.register(0, "opt0", [spec("a")]))
    accepted(registry.register(0, "opt0", [spec("b")]))
    accepted(registry.register(1, "opt0", [spec("a")]))
    assert registry.compare({0, 1}) is None
    accepted(registry.register(1, "opt0", [spec("c")]))
    error = registry.compare({0, 1})
    assert error is not None
    assert "rank 0 lacks 'c'; rank 1 lacks 'b'" in error.message


def test_a_turn_may_come_in_parts_cut_elsewhere_on_each_rank() -> None:
    registry = Registry(MANY, 0)
    accepted(registry.register(0, "opt0", [spec("a"), spec("b")], last=False))
    accepted(registry.register(0, "opt0", [spec("c")]))
    accepted(registry.register(1, "opt0", [spec("c")], last=False))
    assert registry.compare({0, 1}) is None
    accepted(registry.register(1, "opt0", [spec("b"), spec("a")]))
    assert registry.compare({0, 1}) is None


def test_ranks_that_are_gone_are_not_compared_and_ungrouped_names_never() -> None:
    registry = Registry(MANY, 0)
    accepted(registry.register(0, "opt0", [spec("a")]))
    accepted(registry.register(1, "opt0", [spec("b")]))
    accepted(registry.register(2, "", [spec("c")]))
    assert registry.compare({1}) is None
    assert registry.compare(set()) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 6), max_size=5)),
        max_size=20,
    )
)
def test_any_order_of_registrations_gives_one_key_per_name(
    requests: list[tuple[int, list[int]]],
) -> None:
    registry = Registry(MANY, 0)
    seen: dict[str, int] = {}
    for rank, numbers in requests:
        specs = [spec(f"t{n}", n) for n in numbers]
        result = accepted(registry.register(rank, "", specs))
        assert result.start <= len(registry.table)
        for one, key in zip(specs, result.keys, strict=True):
            assert seen.setdefault(one.name, key) == key
            assert registry.table[key] == one
    assert sorted(seen.values()) == list(range(len(registry.table)))
    assert registry.nbytes == registry.table.nbytes


@pytest.mark.slow
def test_pages_cover_the_table_and_fit_a_control_message() -> None:
    table = Table()
    for i in range(5000):
        table.append(spec(f"{'long ' * (i % 50)}{i}", 1, 2, 3))
    copy = Table()
    for start in (0, 2500):
        for page in pages(table, start):
            assert len(pack(("TableMessage", *page))) < MAX_CONTROL * 3 // 4
            copy.extend(page.start, page.specs)
    assert copy.digest == table.digest
    assert list(pages(table, 5000)) == []
