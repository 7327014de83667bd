"""Torch tensors as flat wire bytes, and back.

Rules: elements travel in logical (row-major) order whatever the strides, so ranks may use different
memory layouts (C71); lazy conjugation and negation are resolved first (C67); complex numbers travel
as pairs of reals; a dense CPU tensor is never copied, its memory is the wire buffer. Memory is
reached through ``.data``, so that writing a sum does not look like a user's in-place change (V4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from gradsum.errors import UsageError
from gradsum.scheduler.policy import BROADCAST, Policy
from gradsum.scheduler.table import TensorSpec

SUMMED: Final[Mapping[torch.dtype, tuple[str, str]]] = {
    torch.float64: ("float64", "float64"),
    torch.float32: ("float32", "float32"),
    torch.float16: ("float16", "float16"),
    torch.bfloat16: ("bfloat16", "bfloat16"),
    torch.int8: ("int8", "int8"),
    torch.uint8: ("uint8", "uint8"),
    torch.int16: ("int16", "int16"),
    torch.int32: ("int32", "int32"),
    torch.int64: ("int64", "int64"),
    torch.complex32: ("complex32", "float16"),
    torch.complex64: ("complex64", "float32"),
    torch.complex128: ("complex128", "float64"),
}
"""torch dtype -> (name in the table, element type that travels)."""

WIRE: Final[Mapping[str, torch.dtype]] = {
    name: dtype for dtype, (name, wire) in SUMMED.items() if name == wire
}
"""Wire element type -> torch dtype."""

_OPAQUE: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def require_dense(tensor: object, name: str) -> torch.Tensor:
    """The tensor, or a TypeError that names it and the remedy."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{name!r} is a {type(tensor).__name__}, not a tensor: wrap it in torch.tensor(), "
            "or send Python values with broadcast_object()"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"{name!r} is a {tensor.layout} tensor: call .to_dense() first")
    if tensor.is_quantized:
        raise TypeError(f"{name!r} is a quantized tensor: call .dequantize() first")
    if tensor.device.type == "meta":
        raise TypeError(f"{name!r} is on the meta device and holds no values: materialise it first")
    return tensor


def spec_of(
    name: str, tensor: torch.Tensor, policy: Policy, first: int = 1, wire: str | None = None
) -> TensorSpec:
    """The table entry of a tensor; ``wire`` is a compressor's choice, None the tensor's own type.

    A broadcast moves bits, so it takes every dtype; a sum refuses bool and unsigned types beyond 8
    bits with a TypeError.
    """
    require_dense(tensor, name)
    shape = tuple(tensor.shape)
    if tensor.dtype in SUMMED:
        own, natural = SUMMED[tensor.dtype]
        return TensorSpec(name, own, wire or natural, shape, policy, first)
    if policy.kind == BROADCAST:
        return TensorSpec(
            name, dtype_name(tensor.dtype), _OPAQUE[tensor.element_size()], shape, policy, first
        )
    remedy = "uint8 to count votes" if tensor.dtype == torch.bool else "float32 or int64"
    raise TypeError(
        f"tensor {name!r} is {dtype_name(tensor.dtype)}, which has no sum: convert it with "
        f".to(torch.{remedy.split()[0]}) ({remedy})"
    )


def in_place(tensor: torch.Tensor) -> bool:
    """Whether the tensor's own memory is its flat wire form."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A dense row-major CPU tensor with the same values: the tensor's own memory where it can.

    A CUDA tensor is copied to pinned memory and waited for: right, not fast.
    """
    source = tensor.data
    if in_place(source):
        return source
    pinned = source.device.type == "cuda"
    host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
    return host.copy_(source)


def reals(dense: torch.Tensor) -> torch.Tensor:
    """A dense CPU tensor as one row of reals over the same memory."""
    flat = torch.view_as_real(dense) if dense.is_complex() else dense
    return flat.as_strided((flat.numel(),), (1,))  # an extent of 1 may have any stride


def wire_bytes(dense: torch.Tensor) -> memoryview:
    """The memory of a dense CPU tensor as bytes; writing to them writes the tensor."""
    return reals(dense.data).view(torch.uint8).numpy().data


def source_bytes(tensor: torch.Tensor, spec: TensorSpec) -> memoryview:
    """A tensor's wire bytes: its own memory, or a copy when it is strided, cast or elsewhere."""
    dense = host_copy(tensor)
    if spec.wire != spec.dtype and not dense.is_complex():
        dense = dense.to(WIRE[spec.wire])
    return wire_bytes(dense)


class Watch:
    """Remembers a tensor whose bytes are in flight, to notice a change by the user (V4)."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = -1 if tensor.is_inference() else tensor._version

    def require_same(self, tensor: torch.Tensor | None, name: str) -> None:
        """UsageError if another tensor took its place or it was written to."""
        if tensor is self._tensor and (self._version < 0 or tensor._version == self._version):
            return
        raise UsageError(
            f"tensor {name!r} was changed while its sum was on the way",
            tensor=name,
            hint="call synchronize() before you change, clip or replace it",
        )
