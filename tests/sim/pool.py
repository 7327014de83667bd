"""Memory as shared memory is: messages name a place in it, and what was given back is overwritten.

A payload that was laid here is read when its message is delivered, so a block that returns too
early shows as garbage in somebody's sum.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import numpy as np

GARBAGE = 0xE7


class Pool:
    """Blocks by size, the one given back last first."""

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}
        self._blocks: list[tuple[int, Any]] = []  # (address, memory)

    def take(self, nbytes: int) -> Any:
        """Writable memory; it returns when nobody holds it or a view of it."""
        free = self._free.setdefault(nbytes, [])
        if free:
            memory = free.pop()
        else:
            memory = bytearray(nbytes)
            self._blocks.append((np.frombuffer(memory, np.uint8).ctypes.data, memory))
        block = np.frombuffer(memoryview(memory), np.uint8)
        weakref.finalize(block, partial(self._give, memory))
        return block

    def _give(self, memory: bytearray) -> None:
        memory[:] = bytes([GARBAGE]) * len(memory)
        self._free[len(memory)].append(memory)

    def lay(self, payload: Any) -> Any:
        """A function that reads the payload later, without keeping its block alive."""
        view = np.frombuffer(payload, np.uint8) if memoryview(payload).nbytes else None
        for address, memory in self._blocks:
            if view is not None and address == view.ctypes.data and len(memory) == view.nbytes:
                return partial(bytes, memory)
        return partial(bytes, payload)
