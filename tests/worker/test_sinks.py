"""Sums on their way into tensors: division, rounding, strides, pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsum.worker.sinks import BitSink, TensorSink
from gradsum.worker.tensors import dtype_name, wire_bytes


def fill(sink: TensorSink | BitSink, total: torch.Tensor, members: int = 2, exponent: int = 0,
         piece: int = 8) -> torch.Tensor:  # fmt: skip
    data = bytes(wire_bytes(total))  # read-only, as a received frame is
    for start in range(0, len(data), piece):
        sink.write(start, memoryview(data)[start : start + piece], members, exponent)
    return sink.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_are_divided_truly(dtype: torch.dtype) -> None:
    total = torch.tensor([1.0, -3.0, 10.0], dtype=dtype)
    got = fill(TensorSink(torch.empty(3, dtype=dtype), dtype_name(dtype), True), total, 3)
    assert torch.equal(got, total / 3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int64])
def test_integers_are_divided_with_floor(dtype: torch.dtype) -> None:
    total = torch.tensor([7, 8, 100]).to(dtype)
    got = fill(TensorSink(torch.empty(3, dtype=dtype), dtype_name(dtype), True), total, 3)
    assert got.tolist() == [2, 2, 33]
    if dtype != torch.uint8:
        negative = torch.tensor([-7]).to(dtype)
        sink = TensorSink(torch.empty(1, dtype=dtype), dtype_name(dtype), True)
        assert fill(sink, negative, 2).tolist() == [-4]


def test_more_members_than_an_int8_can_count() -> None:
    sink = TensorSink(torch.empty(1, dtype=torch.int8), "int8", True)
    assert fill(sink, torch.tensor([100], dtype=torch.int8), 300).tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_come_back_scaled_and_rounded_once(dtype: torch.dtype) -> None:
    mean = torch.tensor([60000.0, 1.5, -0.25, 3e-5], dtype=dtype)
    scaled = (mean.float() * 3 / 4).to(dtype)  # what a server sends: the sum over 2**2
    sink = TensorSink(torch.empty(4, dtype=dtype), dtype_name(dtype), True)
    got = fill(sink, scaled, 3, 2, piece=2)
    assert torch.equal(got, (scaled.float() * 4 / 3).to(dtype))
    assert torch.isfinite(got).all()


def test_a_cast_wire_is_widened_before_the_division() -> None:
    got = fill(
        TensorSink(torch.empty(2), "float16", True), torch.tensor([1.0, 5.0]).half(), 3, 1, piece=2
    )
    assert torch.equal(got, torch.tensor([2.0, 10.0]) / 3)


def test_c49_complex_numbers_are_divided_as_pairs() -> None:
    sink = TensorSink(torch.empty(1, dtype=torch.complex64), "float32", True)
    assert fill(sink, torch.tensor([4.0, -2.0])).tolist() == [2 - 1j]


def test_c71_strided_targets_are_filled_by_logical_index() -> None:
    base = torch.zeros(3, 2)
    got = fill(TensorSink(base.t(), "float32", False), torch.arange(6.0))
    assert got.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert base.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_tensor_made_on_demand_is_zero_where_nobody_pushed() -> None:
    made: list[torch.Tensor] = []

    def make() -> torch.Tensor:
        made.append(torch.full((4,), 9.0).mul_(0))
        return made[-1]

    sink = TensorSink(make, "float32", True)
    assert not made
    data = bytes(wire_bytes(torch.tensor([4.0, 6.0])))
    sink.write(8, memoryview(data), 2, 0)
    assert sink.finish().tolist() == [0, 0, 2, 3]
    assert len(made) == 1


@pytest.mark.filterwarnings("error")
def test_c62_read_only_payloads_give_no_warning() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32):
        fill(
            TensorSink(torch.empty(8, dtype=dtype), dtype_name(dtype), True),
            torch.ones(8).to(dtype),
        )


def test_a_broadcast_copies_bits() -> None:
    nan = torch.tensor([0x7FC12345, -0x3EDCBB], dtype=torch.int32).view(torch.float32)
    target = torch.zeros(2, 2)[:, 0]
    got = fill(BitSink(target), nan, members=5, piece=4)
    assert got.contiguous().view(torch.int32).tolist() == nan.view(torch.int32).tolist()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40), st.integers(1, 9))
def test_pieces_of_any_size_give_the_same(values: list[float], elements: int) -> None:
    total = torch.tensor(values)
    got = fill(TensorSink(torch.empty(len(values)), "float32", True), total, 7, piece=4 * elements)
    assert torch.equal(got, total / 7)
