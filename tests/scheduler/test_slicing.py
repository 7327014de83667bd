"""Slicing and packing (E8): every byte once, whole elements, append-stable, servers by weight."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsum.errors import ConfigError
from gradsum.proto.dtypes import SIZES, size_of
from gradsum.proto.limits import MAX_PACKED
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.slicing import Layout, Unit
from gradsum.scheduler.table import Table, TensorSpec

WIRES = sorted(SIZES)
POLICIES = (Policy(), Policy(pack="a"), Policy(pack="b"), Policy("broadcast", 0))
SPECS = st.lists(
    st.tuples(st.integers(0, 200), st.sampled_from(WIRES), st.sampled_from(POLICIES)), max_size=12
)
WEIGHTS = st.lists(
    st.sampled_from((0.0, 0.1, 0.3, 1.0, 1.0, 2.5)), min_size=1, max_size=5
).filter(lambda weights: sum(weights) > 0).map(tuple)  # fmt: skip


def table(specs: list[tuple[int, str, Policy]]) -> Table:
    result = Table()
    for number, (elements, wire, policy) in enumerate(specs):
        result.append(TensorSpec(f"t{number}", wire, wire, (elements,), policy))
    return result


def check_unit(unit: Unit, known: Table, step: int, servers: int) -> None:
    """Members lie one after another; slices cover them once, in whole elements, in order."""
    element = size_of(unit.wire)
    offset = 0
    for member in unit.members:
        assert (member.offset, member.length) == (offset, known[member.key].nbytes)
        assert known[member.key].wire == unit.wire
        assert known[member.key].policy == unit.policy
        offset += member.length
    assert unit.nbytes == offset
    assert unit.key == unit.members[0].key
    covered = 0
    for number, one in enumerate(unit.slices):
        assert (one.number, one.offset) == (number, covered)
        assert one.offset % element == one.length % element == 0
        assert one.length <= max(step, element)
        assert one.length > 0 or unit.nbytes == 0
        assert 0 <= one.server < servers
        covered += one.length
    assert covered == unit.nbytes
    assert unit.slices


@settings(deadline=None)
@given(SPECS, st.integers(1, 300), WEIGHTS)
def test_every_byte_is_in_one_slice(
    specs: list[tuple[int, str, Policy]], step: int, weights: tuple[float, ...]
) -> None:
    known = table(specs)
    layout = Layout(known, slice_bytes=step, weights=weights)
    assert list(layout.unit_of) == list(range(len(specs)))
    for unit in layout.units.values():
        check_unit(unit, known, step, len(weights))
        assert not unit.packed


@settings(deadline=None)
@given(SPECS, st.integers(1, 300), WEIGHTS, st.data())
def test_new_tensors_never_move_old_slices(
    specs: list[tuple[int, str, Policy]], step: int, weights: tuple[float, ...], data: st.DataObject
) -> None:
    """However the table grows, the layout is the same: so no slice table is ever sent."""
    whole = Layout(table(specs), slice_bytes=step, weights=weights)
    growing = Table()
    layout = Layout(growing, slice_bytes=step, weights=weights)
    start = 0
    while start < len(specs):
        stop = data.draw(st.integers(start + 1, len(specs)))
        growing.extend(start, table(specs).since(start)[: stop - start])
        before = dict(layout.units)
        layout.extend()
        assert before.items() <= layout.units.items()
        start = stop
    assert layout.units == whole.units


@settings(deadline=None)
@given(SPECS, st.integers(1, 300), WEIGHTS)
def test_servers_carry_their_share_at_every_moment(
    specs: list[tuple[int, str, Policy]], step: int, weights: tuple[float, ...]
) -> None:
    """Never more than one slice above the share; a server without weight carries nothing."""
    layout = Layout(table(specs), slice_bytes=step, weights=weights)
    shares = [weight / sum(weights) for weight in weights]
    carried, total, biggest = [0] * len(weights), 0, 0
    for unit in layout.units.values():
        for one in unit.slices:
            carried[one.server] += one.length
            total += one.length
            biggest = max(biggest, one.length)
            for bytes_, share in zip(carried, shares, strict=True):
                assert bytes_ <= share * total + biggest + 1e-6
                if not share:
                    assert not bytes_


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=10), st.integers(1, 6))
def test_equal_servers_are_within_one_slice_of_each_other_for_equal_slices(
    elements: list[int], servers: int
) -> None:
    specs = [(count * 16, "float32", Policy()) for count in elements]
    layout = Layout(table(specs), slice_bytes=64, weights=(1.0,) * servers)
    carried = [0] * servers
    for unit in layout.units.values():
        for one in unit.slices:
            carried[one.server] += one.length
            assert max(carried) - min(carried) <= 64


@settings(deadline=None)
@given(WEIGHTS, st.integers(50, 400))
def test_no_server_falls_far_behind(weights: tuple[float, ...], count: int) -> None:
    """Below the share by less than two slices, whatever the weights."""
    layout = Layout(table([(count * 16, "float32", Policy())]), slice_bytes=64, weights=weights)
    shares = [weight / sum(weights) for weight in weights]
    carried, total = [0] * len(weights), 0
    for one in layout.units[0].slices:
        carried[one.server] += one.length
        total += one.length
        behind = [share * total - b for b, share in zip(carried, shares, strict=True)]
        assert max(behind) < 2 * 64


@settings(deadline=None)
@given(SPECS, st.integers(1, 300), WEIGHTS, st.integers(0, 900), st.randoms())
def test_packing_keeps_groups_dtypes_and_sizes_apart(
    specs: list[tuple[int, str, Policy]], step: int, weights: tuple[float, ...], pack: int, rng: Any
) -> None:
    known = table(specs)
    order = list(range(len(specs)))
    rng.shuffle(order)
    layout = Layout(
        known, slice_bytes=step, weights=weights, pack_bytes=pack, packing=tuple(order),
        packed=len(specs),
    )  # fmt: skip
    assert sorted(layout.unit_of) == sorted(order)
    for unit in layout.units.values():
        check_unit(unit, known, step, len(weights))
        keys = [member.key for member in unit.members]
        assert [key for key in order if key in keys] == keys  # in ready order
        if unit.packed:
            assert unit.policy.pack
            assert unit.nbytes <= pack
            assert all(0 < known[key].nbytes < pack for key in keys)
    assert {m.key for u in layout.units.values() for m in u.members} == set(order)


def test_small_tensors_of_one_group_share_a_buffer() -> None:
    specs = [(4, "float32", Policy(pack="a"))] * 5 + [(100, "float32", Policy(pack="a"))]
    layout = Layout(
        table(specs), slice_bytes=64, weights=(1.0,), pack_bytes=48, packing=(3, 5, 1, 0, 2, 4),
        packed=6,
    )  # fmt: skip
    shared = [[m.key for m in unit.members] for unit in layout.units.values()]
    assert shared == [[5], [3, 1, 0], [2, 4]]


def test_tensors_after_the_packing_are_on_their_own_until_the_next_one() -> None:
    specs = [(4, "float32", Policy(pack="a"))] * 4
    layout = Layout(
        table(specs), slice_bytes=64, weights=(1.0,), pack_bytes=64, packing=(1, 0), packed=2
    )
    assert [unit.key for unit in layout.units.values()] == [1, 2, 3]


def test_a_buffer_has_at_most_as_many_tensors_as_its_mask_has_room_for() -> None:
    count = MAX_PACKED + 1
    layout = Layout(
        table([(1, "int8", Policy(pack="a"))] * count), slice_bytes=1 << 20, weights=(1.0,),
        pack_bytes=1 << 20, packing=tuple(range(count)), packed=count,
    )  # fmt: skip
    assert [len(unit.members) for unit in layout.units.values()] == [MAX_PACKED, 1]


def test_an_element_larger_than_a_slice_still_travels_whole() -> None:
    layout = Layout(table([(3, "float64", Policy())]), slice_bytes=5, weights=(1.0,))
    assert [one.length for one in layout.units[0].slices] == [8, 8, 8]


@pytest.mark.parametrize(
    ("step", "weights"), [(0, (1.0,)), (8, ()), (8, (0.0, 0.0)), (8, (-1.0, 2.0))]
)
def test_what_gives_no_slices_is_refused(step: int, weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        Layout(Table(), slice_bytes=step, weights=weights)


def test_a_big_tensor_is_cut_into_the_expected_number_of_slices() -> None:
    layout = Layout(table([(1_000_003, "float32", Policy())]), slice_bytes=1 << 20, weights=(1.0,))
    assert len(layout.units[0].slices) == math.ceil(4_000_012 / (1 << 20))
