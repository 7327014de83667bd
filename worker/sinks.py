"""Where sums go: each sink turns pieces of a SUM into values of one tensor.

The server sums, the worker divides (DESIGN 5): true division for floats and complex numbers, floor
for integers; half types pass through float32 and are rounded once. Sinks run on the session's
thread and write disjoint pieces; only ``finish``, on the user's thread, touches strided memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from gradsum.proto.dtypes import HALVES, size_of
from gradsum.worker.tensors import WIRE, in_place, reals, wire_bytes


class _Place(NamedTuple):
    """A tensor and the dense memory that its sum is written to: its own where it can be."""

    target: torch.Tensor
    dense: torch.Tensor
    flat: torch.Tensor

    @classmethod
    def of(cls, target: torch.Tensor) -> _Place:
        data = target.data
        dense = data if in_place(data) else torch.zeros(data.shape, dtype=data.dtype)
        return cls(target, dense, reals(dense))

    def settle(self) -> torch.Tensor:
        if not in_place(self.target.data):
            with torch.no_grad():
                self.target.copy_(self.dense)
        return self.target


class Discard:
    """Takes a sum that nobody wants."""

    def write(self, offset: int, payload: memoryview, members: int, exponent: int) -> None:
        """Nothing is kept."""


class TensorSink:
    """Writes a sum into a tensor.

    target: the tensor, or a function that makes it when the first piece arrives (a gradient that
    this rank does not have exists only if another rank pushed one, V5). wire: element type of the
    payload. average: divide by the members.
    """

    def __init__(
        self,
        target: torch.Tensor | Callable[[], torch.Tensor],
        wire: str,
        average: bool,
    ) -> None:
        self._make = target
        self._wire = wire
        self._average = average
        self._place: _Place | None = None
        if isinstance(target, torch.Tensor):
            self._place = _Place.of(target)

    def _open(self) -> _Place:
        if self._place is None:
            made = self._make if isinstance(self._make, torch.Tensor) else self._make()
            self._place = _Place.of(made)
        return self._place

    def write(self, offset: int, payload: memoryview, members: int, exponent: int) -> None:
        """One piece of the sum, from byte ``offset`` of the wire tensor on."""
        flat = self._open().flat
        if not len(payload):
            return
        size = size_of(self._wire)
        start = offset // size
        piece = flat[start : start + len(payload) // size]
        divisor = members if self._average else 1
        if WIRE[self._wire] != piece.dtype or self._wire in HALVES:
            _write_scaled(piece, payload, self._wire, divisor, exponent)
        else:
            _write_plain(piece, payload, self._wire, divisor, exponent)

    def finish(self) -> torch.Tensor:
        """The tensor with the whole sum; pieces that nobody pushed are zero."""
        return self._open().settle()


class BitSink:
    """Writes a broadcast: the root's bits, whatever they mean."""

    def __init__(self, target: torch.Tensor) -> None:
        self._place = _Place.of(target)
        self._bytes = wire_bytes(self._place.dense)

    def write(self, offset: int, payload: memoryview, members: int, exponent: int) -> None:
        """One piece of the root's bytes."""
        self._bytes[offset : offset + len(payload)] = payload

    def finish(self) -> torch.Tensor:
        """The tensor with the root's values."""
        return self._place.settle()


def _write_plain(
    piece: torch.Tensor, payload: memoryview, wire: str, divisor: int, exponent: int
) -> None:
    """float32, float64 and integers: one numpy pass, no temporary for floats."""
    source = np.frombuffer(payload, dtype=wire)
    out = piece.numpy()
    if exponent:
        source = np.ldexp(source, exponent)
    if divisor == 1:
        out[...] = source
    elif piece.is_floating_point():
        np.divide(source, divisor, out=out)
    else:
        out[...] = np.floor_divide(source, np.int64(divisor))


def _write_scaled(
    piece: torch.Tensor, payload: memoryview, wire: str, divisor: int, exponent: int
) -> None:
    """Half types on the wire: value * 2**exponent / divisor in the wider type, rounded once."""
    raw = torch.empty(piece.shape, dtype=WIRE[wire])
    wire_bytes(raw)[:] = payload
    if divisor == 1 and not exponent:
        piece.copy_(raw)
        return
    wide = raw.to(torch.float64 if piece.dtype == torch.float64 else torch.float32)
    if exponent:
        wide.mul_(2.0**exponent)
    if divisor != 1:
        wide.div_(divisor)
    piece.copy_(wide)
