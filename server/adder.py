"""Adding payloads: the only arithmetic of the service (S2, DESIGN 5).

Rules: the first payload becomes the accumulator where its memory is ours to write (a received frame
is); later ones are added to it. Half types: the first frame is kept as it is, the second widens to
float32, and the result is rounded once, divided by the power of two >= members, whose exponent
travels in the header, so that a mean that fits never overflows as a sum. torch adds half types ~50x
faster than numpy and is imported when the first of them comes, since it costs 190 MB and 2-3 s.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from gradsum.proto.dtypes import HALVES


class Accumulator(Protocol):
    """The growing sum of one round of one slice."""

    def add(self, payload: Any) -> None:
        """Add the next contribution: a buffer of the slice's length."""

    def finish(self, members: int) -> tuple[Any, int]:
        """The sum as a buffer, and its exponent. Nothing may be added after this."""


class _Exact:
    """Types that are summed in their own precision; integers wrap around."""

    __slots__ = ("_dtype", "_payload", "_view")

    def __init__(self, dtype: np.dtype[Any], payload: Any) -> None:
        self._dtype = dtype
        self._payload = payload
        self._view = self._array(payload)
        if not self._view.flags.writeable:
            self._view = self._view.copy()
            self._payload = self._view.view(np.uint8).data

    def _array(self, payload: Any) -> np.ndarray[Any, Any]:
        view = memoryview(payload)
        return np.frombuffer(view, self._dtype) if view.nbytes else np.empty(0, self._dtype)

    def add(self, payload: Any) -> None:
        np.add(self._view, self._array(payload), out=self._view)

    def finish(self, members: int) -> tuple[Any, int]:
        return self._payload, 0


class _Half:
    """float16 and bfloat16: summed in float32, rounded once."""

    __slots__ = ("_dtype", "_first", "_torch", "_wide")

    def __init__(self, wire: str, payload: Any) -> None:
        import torch  # see the top of the file

        self._torch = torch
        self._dtype = getattr(torch, wire)
        self._first = payload
        self._wide: Any = None

    def _tensor(self, payload: Any) -> Any:
        view = memoryview(payload)
        if view.readonly:
            view = memoryview(bytearray(view))
        if not view.nbytes:
            return self._torch.empty(0, dtype=self._dtype)
        return self._torch.frombuffer(view, dtype=self._dtype)

    def add(self, payload: Any) -> None:
        if self._wide is None:
            self._wide = self._tensor(self._first).to(self._torch.float32)
        self._wide.add_(self._tensor(payload))

    def finish(self, members: int) -> tuple[Any, int]:
        if self._wide is None:
            return self._first, 0
        exponent = max(members - 1, 0).bit_length()
        rounded = self._wide.mul_(2.0**-exponent).to(self._dtype)
        return memoryview(rounded.view(self._torch.uint8).numpy()), exponent


class Adder:
    """Starts the right accumulator for a wire dtype."""

    __slots__ = ()

    def start(self, wire: str, payload: Any) -> Accumulator:
        """An accumulator that owns ``payload`` from now on."""
        if wire in HALVES:
            return _Half(wire, payload)
        return _Exact(np.dtype(wire), payload)
