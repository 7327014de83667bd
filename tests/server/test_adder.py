"""The adder against a naive sum, for every dtype that travels (S2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsum.proto.dtypes import HALVES, SIZES
from gradsum.server.adder import Adder

INTEGERS = [wire for wire in SIZES if "int" in wire]
FLOATS = ["float32", "float64"]


def total(wire: str, payloads: list[Any], members: int | None = None) -> tuple[bytes, int]:
    """The sum of payloads in this order; bytes and exponent."""
    accumulator = Adder().start(wire, payloads[0])
    for payload in payloads[1:]:
        accumulator.add(payload)
    result, exponent = accumulator.finish(len(payloads) if members is None else members)
    return bytes(result), exponent


@given(st.sampled_from(INTEGERS), st.integers(1, 6), st.integers(0, 40), st.integers(0, 999))
def test_integers_are_summed_exactly_and_wrap_around(
    wire: str, ranks: int, size: int, seed: int
) -> None:
    info = np.iinfo(wire)
    rows = np.random.default_rng(seed).integers(
        info.min, info.max, (ranks, size), dtype=wire, endpoint=True
    )
    want = np.array([sum(map(int, column)) for column in rows.T], dtype=object) % 2**info.bits
    got, exponent = total(wire, [bytearray(row.tobytes()) for row in rows])
    wrapped = np.frombuffer(got, wire).astype(object) % 2**info.bits
    assert exponent == 0
    assert (wrapped == want).all()


@given(st.sampled_from(FLOATS), st.integers(1, 6), st.integers(0, 40), st.integers(0, 999))
def test_floats_are_added_one_after_another_in_their_own_precision(
    wire: str, ranks: int, size: int, seed: int
) -> None:
    rows = (np.random.default_rng(seed).standard_normal((ranks, size)) * 1e3).astype(wire)
    want = rows[0].copy()
    for row in rows[1:]:
        want += row
    assert total(wire, [bytearray(row.tobytes()) for row in rows]) == (want.tobytes(), 0)


def halves(wire: str, values: Any) -> bytearray:
    tensor = torch.tensor(values).to(getattr(torch, wire))
    return bytearray(tensor.view(torch.uint8).numpy().tobytes())


def widened(wire: str, payload: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=getattr(torch, wire)).double()


@settings(deadline=None)
@given(st.sampled_from(sorted(HALVES)), st.integers(2, 9), st.integers(1, 40), st.integers(0, 999))
def test_half_types_are_summed_wide_and_rounded_once(
    wire: str, ranks: int, size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    payloads = [halves(wire, rng.standard_normal(size) * 50) for _ in range(ranks)]
    wide = torch.zeros(size, dtype=torch.float32)
    for payload in payloads:
        wide += widened(wire, payload).float()
    got, exponent = total(wire, [bytearray(payload) for payload in payloads])
    assert 2 ** (exponent - 1) < ranks <= 2**exponent
    want = (wide / 2**exponent).to(getattr(torch, wire)).double()
    assert torch.equal(widened(wire, got), want)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from((65_504.0, -65_504.0, 60_000.0)))
def test_a_mean_that_fits_never_overflows_as_a_sum(
    present: int, absent: int, value: float
) -> None:
    """float16 ends at 65504: the sum of two such numbers would be infinite."""
    members = present + absent
    got, exponent = total("float16", [halves("float16", [value]) for _ in range(present)], members)
    mean = widened("float16", got).item() * 2**exponent / members
    assert np.isfinite(mean)
    assert mean == pytest.approx(value * present / members, rel=1e-3)


@pytest.mark.parametrize("wire", sorted(HALVES))
def test_one_half_payload_is_passed_on_as_it_came(wire: str) -> None:
    payload = halves(wire, [1.5, -2.0, 65_000.0])
    accumulator = Adder().start(wire, payload)
    assert accumulator.finish(4) == (payload, 0)


@pytest.mark.parametrize("wire", sorted(SIZES))
def test_an_empty_slice_has_an_empty_sum(wire: str) -> None:
    assert total(wire, [b"", b"", b""])[0] == b""


@pytest.mark.parametrize("wire", sorted(SIZES))
def test_memory_that_cannot_be_written_is_left_alone(wire: str) -> None:
    payloads = [bytes(8) if wire not in HALVES else bytes(halves(wire, [1.0, 2.0]))] * 3
    copies = [bytes(payload) for payload in payloads]
    total(wire, payloads)
    assert payloads == copies


def test_the_first_payload_becomes_the_accumulator() -> None:
    first = bytearray(np.array([1, 2], "float32").tobytes())
    accumulator = Adder().start("float32", first)
    accumulator.add(np.array([10, 20], "float32").tobytes())
    payload, _ = accumulator.finish(2)
    assert payload is first
    assert np.frombuffer(first, "float32").tolist() == [11, 22]


@pytest.mark.parametrize("wire", [*FLOATS, *sorted(HALVES)])
def test_infinities_and_nans_go_through(wire: str) -> None:
    one, two = [float("inf"), float("nan"), 1.0], [1.0, 1.0, float("-inf")]
    if wire in HALVES:
        got, _ = total(wire, [halves(wire, one), halves(wire, two)])
        result = widened(wire, got).tolist()
    else:
        rows = [bytearray(np.array(row, wire).tobytes()) for row in (one, two)]
        result = np.frombuffer(total(wire, rows)[0], wire).tolist()
    assert result[0] == float("inf")
    assert result[1] != result[1]
    assert result[2] == float("-inf")
