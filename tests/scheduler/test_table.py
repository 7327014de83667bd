"""The tensor table: keys by order, hashes of prefixes, what a spec from the wire must be (I1)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.errors import GradsumError, NotBuilt, ProtocolError
from gradsum.proto.codec import pack, unpack
from gradsum.proto.limits import MAX_DIMS, MAX_NAME
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import Table, TensorSpec, parse_spec
from tests.proto.strategies import VALUES


def spec(name: str, shape: tuple[int, ...] = (2, 3), wire: str = "float32") -> TensorSpec:
    return TensorSpec(name, wire, wire, shape, Policy())


def table(*names: str) -> Table:
    result = Table()
    for name in names:
        result.append(spec(name))
    return result


def test_keys_are_places_in_the_order_of_appending() -> None:
    full = table("a", "b", "c")
    assert [full.key(n) for n in "abc"] == [0, 1, 2]
    assert full.key("d") is None
    assert full[1].name == "b"
    assert full.get(3) is None
    assert full.get(-1) is None


def test_a_name_is_appended_once() -> None:
    with pytest.raises(ProtocolError, match="'a' is in the table already"):
        table("a").append(spec("a", (9,)))


def test_equal_prefixes_have_equal_digests_and_others_do_not() -> None:
    assert table("a", "b").digest == table("a", "b").digest
    assert table("a", "b").digest != table("b", "a").digest
    assert table("a").digest != table("a", "b").digest
    changed = Table()
    changed.append(spec("a", (3, 2)))
    assert changed.digest != table("a").digest


@given(st.integers(0, 6), st.integers(0, 6))
def test_a_copy_follows_in_pieces_that_overlap(known: int, start: int) -> None:
    names = [f"t{i}" for i in range(6)]
    full, copy = table(*names), table(*names[:known])
    if start > known:
        with pytest.raises(ProtocolError, match="only"):
            copy.extend(start, full.since(start))
        return
    assert copy.extend(start, full.since(start)) == 6 - known
    assert copy.digest == full.digest
    assert copy.extend(0, full.since(0)) == 0


def test_bytes_on_the_wire() -> None:
    assert spec("a", ()).nbytes == 4
    assert spec("a", (0, 5)).nbytes == 0
    assert spec("a", (3,), "bfloat16").nbytes == 6
    assert TensorSpec("c", "complex64", "float32", (3,), Policy()).nbytes == 24
    assert table("a", "b").nbytes == 48


def test_a_spec_describes_itself_for_errors() -> None:
    assert spec("a").describe() == "float32[2, 3]"
    half = TensorSpec("a", "float32", "float16", (2,), Policy("broadcast", 1))
    assert half.describe() == "float32[2] as float16 broadcast from rank 1"


def test_specs_survive_the_wire() -> None:
    one = TensorSpec("a", "complex64", "float32", (2, 3), Policy("broadcast", 1, pack="p"), 7)
    assert parse_spec(unpack(pack(one))) == one


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""}, {"name": "x" * (MAX_NAME + 1)}, {"name": b"a"}, {"wire": "bool"},
        {"wire": "float8"}, {"shape": (1,) * (MAX_DIMS + 1)}, {"shape": (-1,)},
        {"shape": (1 << 62, 4)}, {"shape": 3}, {"first": 0}, {"first": True}, {"policy": ()},
        {"policy": ("sum", "0", 1, 0, "round", "service", "")},
    ],
    ids=str,
)  # fmt: skip
def test_a_spec_that_cannot_be_right_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        parse_spec(tuple(spec("a")._replace(**change)))


def test_a_policy_that_is_not_built_is_refused_by_its_own_error() -> None:
    with pytest.raises(NotBuilt, match="slack=2"):
        parse_spec(tuple(spec("a")._replace(policy=Policy(slack=2))))


@given(VALUES)
def test_junk_is_never_more_than_a_gradsum_error(raw: object) -> None:
    with pytest.raises(GradsumError):
        parse_spec(raw)
