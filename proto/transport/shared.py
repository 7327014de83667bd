"""Shared memory between processes of one host, as one of them uses it (DESIGN 7).

A payload is *laid*: written once to memory of its sender, and the peer is told where. Rules: each
process writes only its own memory and maps others' read-only; a peer is local when it runs in the
same home and its probe can be mapped; whatever cannot be laid or read travels by TCP.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import psutil

from gradsum.errors import ProtocolError
from gradsum.proto.local import Place, decode_place, encode_place
from gradsum.proto.transport.mapping import Mappings
from gradsum.proto.transport.segment import Arena, home

SHARE: Final = 2
"""One process may lay at most this part of the machine's memory: half of it."""


class SharedMemory:
    """This process's own memory, and what it has mapped of others."""

    __slots__ = ("_arena", "_mappings", "active", "home")

    def __init__(self, wanted: bool) -> None:
        """wanted False: never local."""
        self.home = home() if wanted else ""
        self._arena = Arena(psutil.virtual_memory().total // SHARE)
        self._mappings = Mappings()
        self.active = False
        """Whether some peer reads our memory, so that it pays to lay things there."""

    def offer(self) -> tuple[str, bytes]:
        """(home, probe) for a peer; empty when there is nothing to offer."""
        place = self._arena.probe() if self.home else None
        return ("", b"") if place is None else (self.home, encode_place(place))

    def accept(self, home: str, probe: bytes) -> int | None:
        """The process whose memory an offer shows, None if it cannot be read here."""
        if not home or home != self.home:
            return None
        try:
            place = decode_place(probe)
            self._mappings.view(place, 1)
        except ProtocolError:
            return None
        return place.pid

    def take(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        """Writable bytes that peers can read; None: not wanted by anybody, or none left."""
        return self._arena.take(nbytes) if self.active else None

    def allocate(self, nbytes: int) -> memoryview:
        """Writable bytes, shared where it pays; a place that is not shared is copied later."""
        block = self.take(nbytes)
        return memoryview(bytearray(nbytes)) if block is None else block.data

    def lay(self, payload: Any) -> bytes | None:
        """The encoded place of memory that was taken here; None: it lies elsewhere."""
        place = self._arena.place(payload)
        return None if place is None else encode_place(place)

    def copy(self, payload: Any) -> tuple[np.ndarray[Any, Any], bytes] | None:
        """A copy in our memory and its encoded place; None when there is no room."""
        view = memoryview(payload)
        block = self._arena.take(view.nbytes)
        place = None if block is None else self._arena.place(block)
        if block is None or place is None:
            return None
        np.copyto(block, np.frombuffer(view, np.uint8))
        return block, encode_place(place)

    def read(self, data: bytes | memoryview, length: int, pid: int | None = None) -> memoryview:
        """What lies at a peer's place, read-only. ProtocolError for what cannot be read, and for
        a place of another process than ``pid``."""
        place: Place = decode_place(data)
        if pid is not None and place.pid != pid:
            raise ProtocolError(f"a place of process {place.pid}, not of {pid}")
        return self._mappings.view(place, length)

    def forget(self) -> None:
        """The peers are gone; views keep what they show."""
        self.active = False
        self._mappings.forget()

    def close(self) -> None:
        """Give everything back; what is in use stays readable here."""
        self.forget()
        self._arena.close()
