"""Casts that halve what travels: ``Compression.none``, ``Compression.fp16``, ``Compression.bf16``.

Only float32 and float64 tensors are cast; integers, half types and complex numbers travel as they
are. Values beyond 65504 become infinite in fp16; bf16 keeps the range and drops digits. The sum is
made in float32 and the result comes back in the tensor's own dtype.
"""

from __future__ import annotations

from typing import ClassVar, Final, NamedTuple

import torch


class Compressor(NamedTuple):
    """A cast for the wire; wire None sends tensors as they are."""

    name: str
    wire: torch.dtype | None = None

    def wire_for(self, tensor: torch.Tensor) -> torch.dtype | None:
        """The dtype that travels for this tensor, or None for its own."""
        return self.wire if tensor.dtype in _CAST else None


class Compression:
    """The compressors to choose from, under BytePS's names."""

    none: ClassVar[Compressor] = Compressor("none")
    fp16: ClassVar[Compressor] = Compressor("fp16", torch.float16)
    bf16: ClassVar[Compressor] = Compressor("bf16", torch.bfloat16)


def require_compressor(value: object) -> Compressor:
    """The compressor; None means none; anything else is a TypeError."""
    if value is None:
        return Compression.none
    if isinstance(value, Compressor):
        return value
    raise TypeError(
        f"compression={value!r}: use Compression.none, Compression.fp16 or Compression.bf16"
    )


_CAST: Final = frozenset({torch.float32, torch.float64})
