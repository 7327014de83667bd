"""What the benchmark pushes, and how it knows that every element of every result is right.

Element i of tensor t is, on rank r in round n,

    base[i + 13 t] + stamp(r, n, t)        base[j] = 40503 j mod 65521

All numbers are whole and every sum stays below 2^24, so float32 holds them exactly in any order of
addition and results are compared with ==. Neighbours, and slices that lie a power of two apart,
have other base values; in one round the ranks have different stamps; a rank's stamps differ in any
508 rounds in a row. So an element that was counted twice or left out, belongs to another round,
another tensor or another place, or was summed over other ranks, gives another number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

MAX_RANKS: Final = 250
_STEP: Final = 40503
_PRIME: Final = 65521
_SHIFT: Final = 13  # elements between the patterns of two tensors
_STAMPS: Final = 509  # a prime, so a factor in 1..508 keeps different ranks different
_CHUNK: Final = 1 << 18  # elements compared at a time: stays in the cache, needs no second copy


class Wrong(NamedTuple):
    """Wrong elements of one rank in one round, and the first of them."""

    elements: int
    tensor: int = -1
    place: int = -1
    got: float = 0.0
    expected: float = 0.0


def shapes(total_bytes: int, tensors: int) -> list[int]:
    """Float32 elements per tensor: as equal as can be, ``total_bytes`` together."""
    share, rest = divmod(total_bytes // 4, tensors)
    return [share + (i < rest) for i in range(tensors)]


def stamp(rank: int, round_number: int, tensor: int) -> int:
    """0..508."""
    factor = 1 + (round_number + 7 * tensor) % (_STAMPS - 1)
    return (rank + 1) * factor % _STAMPS


class Payload:
    """The tensors of one rank, float32, filled anew for every round and checked after it."""

    def __init__(self, total_bytes: int, tensors: int, rank: int, size: int) -> None:
        if not 1 <= size <= MAX_RANKS:
            raise ValueError(f"{size} ranks: sums are exact for 1 to {MAX_RANKS}")
        counts = shapes(total_bytes, tensors)
        places = torch.arange(max(counts) + _SHIFT * tensors)
        base = places.mul_(_STEP).remainder_(_PRIME).to(torch.float32)
        self._rank = rank
        self._size = size
        self._bases = [base[_SHIFT * t :][:count] for t, count in enumerate(counts)]
        self.tensors: Sequence[torch.Tensor] = [torch.empty(count) for count in counts]

    def fill(self, round_number: int) -> None:
        """Write this rank's numbers for a round into ``tensors``."""
        for t, (tensor, base) in enumerate(zip(self.tensors, self._bases, strict=True)):
            torch.add(base, stamp(self._rank, round_number, t), out=tensor)

    def check(self, round_number: int) -> Wrong:
        """Compare every element of ``tensors`` with the sum over all ranks."""
        first, elements = Wrong(0), 0
        for t, (tensor, base) in enumerate(zip(self.tensors, self._bases, strict=True)):
            stamps = sum(stamp(rank, round_number, t) for rank in range(self._size))
            for start in range(0, len(tensor), _CHUNK):
                got = tensor[start : start + _CHUNK]
                expected = (base[start : start + _CHUNK] * self._size).add_(stamps)
                if torch.equal(got, expected):
                    continue
                bad = (got != expected).nonzero().flatten()
                if not elements:
                    i = int(bad[0])
                    first = Wrong(0, t, start + i, got[i].item(), expected[i].item())
                elements += len(bad)
        return first._replace(elements=elements)
