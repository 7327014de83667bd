"""Which whole numbers the benchmark pushes, so that every sum is exact and any mistake shows.

Element i of tensor t is, on rank r in round n,

    base[i + 13 t] + stamp(r, n, t)        base[j] = 40503 j mod P        stamp < S

with two primes P and S that depend on what travels: every input and every sum is a whole number
that the wire's type holds exactly (below 2^24 for fp32, at most 2048 for fp16 and 256 for bf16), in
any order of addition, so results are compared with ==. Neighbours, and slices that lie a power of
two apart, have other base values; in one round the ranks have different stamps; a rank's stamps
differ in any S - 1 rounds in a row. So an element that was counted twice or left out, belongs to
another round, another tensor or another place, or was summed over other ranks, gives another
number.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

STEP: Final = 40503
SHIFT: Final = 13
"""Elements between the patterns of two tensors."""

MAX_RANKS: Final[Mapping[str, int]] = MappingProxyType({"fp32": 250, "fp16": 30, "bf16": 10})
"""Wire -> the most ranks whose sums are exact."""

_LIMITS: Final = {"fp16": 2048, "bf16": 256}


class Numbers(NamedTuple):
    """The primes P and S."""

    bases: int
    stamps: int

    @classmethod
    def of(cls, wire: str, size: int) -> Numbers:
        """For sums over ``size`` ranks; ValueError for more than are exact."""
        if not 1 <= size <= MAX_RANKS[wire]:
            raise ValueError(
                f"{size} ranks: sums are exact for 1 to {MAX_RANKS[wire]} with {wire} on the wire"
            )
        if wire == "fp32":
            return cls(65521, 509)
        each = _LIMITS[wire] // size  # the largest number of a rank: half base, half stamp
        stamps = _prime(each // 2 + 1)
        return cls(_prime(each - stamps + 2), stamps)

    def stamp(self, rank: int, round_number: int, tensor: int) -> int:
        """0..S-1; ranks differ since the factor is none of the prime S."""
        factor = 1 + (round_number + 7 * tensor) % (self.stamps - 1)
        return (rank + 1) * factor % self.stamps


def _prime(most: int) -> int:
    """The largest prime up to ``most`` that is no factor of STEP."""
    return next(
        n for n in range(most, 1, -1) if STEP % n and all(n % i for i in range(2, int(n**0.5) + 1))
    )
