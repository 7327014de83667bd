"""Fills the tensors of one rank of the benchmark, and looks at every element of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from gradsum.deploy.bench_numbers import SHIFT, STEP, Numbers

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


class Payload:
    """The numbers of one rank: float32 tensors of ``counts`` elements, fresh ones every round.

    The tensors are the caller's, since an optimizer may put others in the place of its gradients.
    """

    def __init__(self, counts: Sequence[int], rank: int, size: int, wire: str = "fp32") -> None:
        self._numbers = Numbers.of(wire, size)
        places = torch.arange(max(counts) + SHIFT * len(counts))
        base = places.mul_(STEP).remainder_(self._numbers.bases).to(torch.float32)
        self._rank = rank
        self._size = size
        self._bases = [base[SHIFT * t :][:count] for t, count in enumerate(counts)]

    def fill(self, tensors: Sequence[torch.Tensor], round_number: int) -> None:
        """Write this rank's numbers for a round."""
        for t, (tensor, base) in enumerate(zip(tensors, self._bases, strict=True)):
            torch.add(base, self._numbers.stamp(self._rank, round_number, t), out=tensor)

    def check(self, tensors: Sequence[torch.Tensor], round_number: int, divisor: int = 1) -> Wrong:
        """Compare every element with the sum over all ranks, divided once in float32."""
        first, elements = Wrong(0), 0
        for t, (tensor, base) in enumerate(zip(tensors, self._bases, strict=True)):
            stamps = sum(self._numbers.stamp(r, round_number, t) for r in range(self._size))
            for start in range(0, len(tensor), _CHUNK):
                got = tensor[start : start + _CHUNK]
                expected = (base[start : start + _CHUNK] * self._size).add_(stamps)
                if divisor != 1:
                    expected.div_(divisor)
                if torch.equal(got, expected):
                    continue
                bad = (got != expected).nonzero().flatten()
                if not elements:
                    i = int(bad[0])
                    first = Wrong(0, t, start + i, got[i].item(), expected[i].item())
                elements += len(bad)
        return first._replace(elements=elements)
