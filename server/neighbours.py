"""Neighbours: workers of this host, whose pushes and sums stay in shared memory (DESIGN 7).

Rules: a worker is a neighbour for one connection generation, after its probe has been mapped; only
places of that process are read; what cannot be read is counted and its worker told, which then
connects again without shared memory.
"""

from __future__ import annotations

from typing import Any

from gradsum.errors import ProtocolError
from gradsum.proto.peer import Attach
from gradsum.proto.transport.shared import SharedMemory


class Neighbours:
    """Which ranks share memory with this shard, as which process."""

    __slots__ = ("_pids", "memory")

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._pids: dict[int, int] = {}

    def greet(self, rank: int, attach: Attach) -> None:
        """A worker's connection says where it runs."""
        pid = self.memory.accept(attach.home, attach.probe)
        if pid is None:
            self._pids.pop(rank, None)
        else:
            self._pids[rank] = pid
        self.memory.active = bool(self._pids)

    def __contains__(self, rank: int) -> bool:
        return rank in self._pids

    def read(self, rank: int, place: Any, length: int) -> memoryview:
        """A neighbour's payload. ProtocolError when it cannot be read."""
        pid = self._pids.get(rank)
        if pid is None:
            raise ProtocolError(f"rank {rank} placed a push but shares no memory with us")
        return self.memory.read(place, length, pid)

    def lay(self, rank: int, payload: Any) -> bytes | None:
        """Where a sum lies, for a neighbour; None: it travels by TCP."""
        return self.memory.lay(payload) if rank in self._pids else None

    def clear(self) -> None:
        """The job is over."""
        self._pids.clear()
        self.memory.forget()
