"""Adding payloads: the only arithmetic of the service (S2, DESIGN 5).

Rules: the first payload becomes the accumulator where its memory is ours to write (a received frame
is); later ones are added to it. Where readers share memory with us, or the first payload lies in
its sender's memory, the first addition puts the sum into memory of ours, and nothing is copied.
Half types: the first frame is kept as it is, the second widens to float32, and the result is
rounded once, divided by the power of two >= members, whose exponent travels in the header, so that
a mean that fits never overflows as a sum. torch adds half types ~50x faster than numpy and is
imported when the first of them comes, since it costs 190 MB and 2-3 s.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from gradsum.proto.dtypes import HALVES


class Accumulator(Protocol):
    """The growing sum of one round of one slice."""

    def add(self, payload: Any) -> None:
        """Add the next contribution: a buffer of the slice's length."""

    def finish(self, members: int) -> tuple[Any, int]:
        """The sum as a buffer, and its exponent. Nothing may be added after this."""


Array = np.ndarray[Any, Any]
Take = Callable[[int], Array | None]
"""Memory of ours that readers can map, as bytes; None: nobody would, or none is left."""


def nowhere(nbytes: int) -> Array | None:
    """No shared memory."""
    return None


class _Exact:
    """Types that are summed in their own precision; integers wrap around."""

    __slots__ = ("_dtype", "_payload", "_sum", "_take", "_view")

    def __init__(self, dtype: np.dtype[Any], payload: Any, take: Take) -> None:
        self._dtype = dtype
        self._take = take
        self._payload = payload
        self._view = self._array(payload)
        self._sum: Array | None = None

    def _array(self, payload: Any) -> Array:
        view = memoryview(payload)
        return np.frombuffer(view, self._dtype) if view.nbytes else np.empty(0, self._dtype)

    def _place(self) -> Array:
        """Where the sum goes: shared memory, else the received memory, else fresh memory."""
        block = self._take(self._view.nbytes) if self._view.nbytes else None
        if block is not None:
            self._payload = block.data
            return block.view(self._dtype)
        if self._view.flags.writeable:
            return self._view
        fresh = np.empty_like(self._view)
        self._payload = fresh.view(np.uint8).data
        return fresh

    def add(self, payload: Any) -> None:
        if self._sum is None:
            self._sum = self._place()
        np.add(self._view, self._array(payload), out=self._sum)
        self._view = self._sum

    def finish(self, members: int) -> tuple[Any, int]:
        if self._sum is None and not self._view.flags.writeable:  # alone, in its sender's memory
            self._sum = self._place()
            np.copyto(self._sum, self._view)
        return self._payload, 0


class _Half:
    """float16 and bfloat16: summed in float32, rounded once."""

    __slots__ = ("_dtype", "_first", "_take", "_torch", "_wide")

    def __init__(self, wire: str, payload: Any, take: Take) -> None:
        import torch  # see the top of the file

        self._torch = torch
        self._dtype = getattr(torch, wire)
        self._take = take
        self._first = payload
        self._wide: Any = None

    def _tensor(self, payload: Any) -> Any:
        view = memoryview(payload)
        if not view.nbytes:
            return self._torch.empty(0, dtype=self._dtype)
        return self._torch.frombuffer(view, dtype=self._dtype)

    def add(self, payload: Any) -> None:
        if self._wide is None:
            self._wide = self._tensor(self._first).to(self._torch.float32)
        self._wide.add_(self._tensor(payload))

    def finish(self, members: int) -> tuple[Any, int]:
        if self._wide is None:
            return self._alone(), 0
        exponent = max(members - 1, 0).bit_length()
        self._wide.mul_(2.0**-exponent)
        block = self._take(2 * self._wide.numel()) if self._wide.numel() else None
        if block is None:
            rounded = self._wide.to(self._dtype)
            return memoryview(rounded.view(self._torch.uint8).numpy()), exponent
        self._tensor(block).copy_(self._wide)
        return block.data, exponent

    def _alone(self) -> Any:
        """The only payload: copied when it lies in its sender's memory."""
        view = memoryview(self._first)
        if not view.readonly or not view.nbytes:
            return self._first
        block = self._take(view.nbytes)
        mine = np.empty(view.nbytes, np.uint8) if block is None else block
        np.copyto(mine, np.frombuffer(view, np.uint8))
        return mine.data


class Adder:
    """Starts the right accumulator for a wire dtype."""

    __slots__ = ("_quiet", "_take")

    def __init__(self, take: Take = nowhere) -> None:
        """take: where sums go that readers of this host will map."""
        self._take = take
        self._quiet = False

    def start(self, wire: str, payload: Any) -> Accumulator:
        """An accumulator that owns ``payload`` from now on."""
        if wire in HALVES:
            if not self._quiet:  # torch warns of memory that is only read here, and read-only
                self._quiet = True
                warnings.filterwarnings("ignore", "The given buffer is not writable")
            return _Half(wire, payload, self._take)
        return _Exact(np.dtype(wire), payload, self._take)
