"""Tensors as wire bytes: dtypes, layouts, and the errors for what does not travel."""

from __future__ import annotations

import pytest
import torch

from gradsum.errors import UsageError
from gradsum.scheduler.policy import Policy
from gradsum.worker.tensors import (
    SUMMED,
    Watch,
    host_copy,
    in_place,
    source_bytes,
    spec_of,
    wire_bytes,
)

SUM = Policy()


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_every_dtype_has_a_spec_and_its_own_memory(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    spec = spec_of("t", tensor, SUM)
    data = wire_bytes(tensor)
    assert len(data) == spec.nbytes == tensor.numel() * tensor.element_size()
    assert data.format == "B" and not data.readonly
    data[:] = bytes(len(data))
    assert not tensor.any()


def test_c01_bfloat16_travels_as_its_own_bits() -> None:
    assert wire_bytes(torch.tensor([1.5, -3.0], dtype=torch.bfloat16)).hex() == "c03f40c0"


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,)])
def test_c79_c94_shapes_without_extent(shape: tuple[int, ...]) -> None:
    spec = spec_of("t", torch.ones(shape, dtype=torch.float64), SUM)
    assert spec.shape == shape
    assert len(wire_bytes(torch.ones(shape, dtype=torch.float64))) == spec.nbytes


def test_c67_conjugate_and_negative_views_send_their_values() -> None:
    lazy = torch.tensor([1 + 2j]).conj()
    assert lazy.is_conj()
    assert source_bytes(lazy, spec_of("t", lazy, SUM)) == wire_bytes(torch.tensor([1.0, -2.0]))
    negative = torch.tensor([1 + 2j]).conj().imag
    assert negative.is_neg()
    assert source_bytes(negative, spec_of("t", negative, SUM)) == wire_bytes(torch.tensor([-2.0]))


def test_c71_channels_last_travels_in_logical_order() -> None:
    plain = torch.arange(144.0).view(4, 4, 3, 3)
    other = plain.to(memory_format=torch.channels_last)
    assert other.stride() == (36, 1, 12, 4) and not in_place(other)
    assert source_bytes(other, spec_of("t", other, SUM)) == wire_bytes(plain)


def test_a_dense_tensor_is_not_copied() -> None:
    tensor = torch.zeros(4)
    wire_bytes(host_copy(tensor))[:4] = b"\x00\x00\x80\x3f"
    assert tensor[0] == 1.0


def test_an_extent_of_one_may_have_any_stride() -> None:
    odd = torch.view_as_real(torch.tensor([1 + 2j, 3 + 4j]))[1:, 0]
    assert odd.is_contiguous() and odd.stride() == (2,)
    assert wire_bytes(odd) == wire_bytes(torch.tensor([3.0]))


def test_writing_the_wire_bytes_is_no_change_by_the_user() -> None:
    tensor = torch.zeros(4)
    watch = Watch(tensor)
    wire_bytes(tensor)[:] = bytes(range(16))
    watch.require_same(tensor, "t")
    tensor.add_(1)
    with pytest.raises(UsageError, match=r"(?s)'t' was changed.*synchronize\(\)"):
        watch.require_same(tensor, "t")


def test_another_tensor_in_its_place_is_a_change() -> None:
    tensor = torch.zeros(4)
    with pytest.raises(UsageError):
        Watch(tensor).require_same(tensor.clone(), "t")
    with pytest.raises(UsageError):
        Watch(tensor).require_same(None, "t")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.tensor([True]), r"'mask' is bool.*uint8"),
        (torch.eye(2).to_sparse(), r"'mask'.*to_dense"),
        (torch.empty(1, device="meta"), "meta"),
        (torch.zeros(1, dtype=torch.uint32), r"uint32.*int64"),
    ],
    ids=["bool", "sparse", "meta", "uint32"],
)
def test_what_has_no_sum_is_refused_with_a_remedy(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        spec_of("mask", tensor, SUM)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint32, torch.float8_e4m3fn, torch.uint64])
def test_a_broadcast_takes_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=torch.uint8).to(dtype)
    spec = spec_of("t", tensor, Policy(kind="broadcast", root=0))
    assert spec.nbytes == len(wire_bytes(tensor))


def test_a_cast_for_the_wire_keeps_name_and_shape() -> None:
    tensor = torch.tensor([1.5, 2.5])
    spec = spec_of("t", tensor, SUM, wire="bfloat16")
    assert (spec.dtype, spec.wire, spec.nbytes) == ("float32", "bfloat16", 4)
    expected = wire_bytes(torch.tensor([1.5, 2.5], dtype=torch.bfloat16))
    assert source_bytes(tensor, spec) == expected
