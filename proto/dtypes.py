"""The dtypes that travel, as names and sizes; nothing here adds or converts.

Complex numbers travel as pairs of reals of half the size. Bool has no sum and does not travel.
"""

from __future__ import annotations

from typing import Final

from gradsum.errors import ProtocolError

SIZES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
"""Wire dtype -> bytes of one element."""

HALVES: Final = frozenset({"float16", "bfloat16"})
"""Types that are summed in float32 and rounded once (S2)."""

CODES: Final[dict[str, int]] = {name: code for code, name in enumerate(SIZES, start=1)}
NAMES: Final[dict[int, str]] = {code: name for name, code in CODES.items()}


def size_of(wire: str) -> int:
    """Bytes of one element of a wire dtype; ProtocolError for a name that does not travel."""
    try:
        return SIZES[wire]
    except KeyError:
        raise ProtocolError(
            f"dtype {wire!r} cannot be summed", hint=f"one of: {', '.join(SIZES)}"
        ) from None
