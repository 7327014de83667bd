"""Segments: this process's own memory that peers of the host may map (DESIGN 7).

A segment is an anonymous memfd: no name is left after a crash. Rules: it is sealed against
shrinking, or its readers could be killed (SIGBUS), and against new writable mappings, so that only
its owner writes; a block is free when the last reference to its memory is gone, views and frames on
their way included; the block freed last is taken first, since its pages are the warmest; freed
memory keeps its pages, which cost more than the sum to get anew.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Any, Final

import numpy as np

from gradsum.proto.local import Place

PAGE: Final = 4096
_FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1; Python's fcntl does not name it

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def home() -> str:
    """The same text in processes that can share memory: boot id, network and pid namespace.

    Empty where it cannot be told; then nobody is local.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        spaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "pid")]
    except OSError:
        return ""
    return f"{boot}:{spaces[0]}:{spaces[1]}"


class _Segment:
    """One memfd, mapped by its owner; ``top``: how much of it has been cut into blocks."""

    __slots__ = ("base", "device", "fd", "inode", "map", "size", "top")

    def __init__(self, size: int) -> None:
        """OSError or ValueError when the system has no more."""
        self.size = size
        self.top = 0
        self.fd = os.memfd_create("gradsum", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            self.map = mmap.mmap(self.fd, size)
            _seal(self.fd)
            known = os.fstat(self.fd)
        except (OSError, ValueError):
            os.close(self.fd)
            raise
        self.device, self.inode = known.st_dev, known.st_ino
        self.base = int(np.frombuffer(self.map, np.uint8).ctypes.data)


def _seal(fd: int) -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | _FUTURE_WRITE)
    except OSError:  # an older kernel: peers map it read-only by themselves
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


class Arena:
    """Blocks of whole pages in segments that are made on demand. Any thread may call."""

    def __init__(self, limit: int, segment_bytes: int = 256 << 20) -> None:
        """limit: bytes that may be cut in all; segments are sparse, so their size costs little."""
        self._limit = limit
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []
        self._free: dict[int, deque[tuple[_Segment, int]]] = {}
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """Bytes that have been cut into blocks."""
        return sum(segment.top for segment in self._segments)

    @property
    def used(self) -> int:
        """Bytes of blocks that somebody holds."""
        return self.capacity - sum(size * len(free) for size, free in self._free.items())

    def take(self, nbytes: int) -> Bytes | None:
        """Writable memory of exactly ``nbytes``, at a page; None at the limit, or when the system
        has none. It may hold what was there before."""
        if nbytes <= 0 or self._closed or os.getpid() != self._process:
            return None
        size = -(-nbytes // PAGE) * PAGE
        with self._lock:
            found = self._find(size)
            if found is None:
                return None
            segment, offset = found
            block = np.frombuffer(segment.map, np.uint8, nbytes, offset)
            finalizer = weakref.finalize(block, self._free[size].append, found)
        finalizer.atexit = False
        return block

    def _find(self, size: int) -> tuple[_Segment, int] | None:
        free = self._free.setdefault(size, deque())
        if free:
            return free.pop()
        if self._segments and not self.used:  # another size of slices: begin anew
            for segment in self._segments:
                segment.top = 0
            self._free = {size: deque()}
        if self.capacity + size > self._limit:
            return None
        room = [segment for segment in self._segments if segment.top + size <= segment.size]
        if not room:
            try:
                room = [_Segment(max(size, self._segment_bytes))]
            except (OSError, ValueError):
                return None
            self._segments += room
        segment = room[0]
        segment.top += size
        return segment, segment.top - size

    def place(self, buffer: Any) -> Place | None:
        """Where a buffer lies; None when it does not lie wholly in one segment of ours."""
        if self._closed or os.getpid() != self._process:
            return None
        array = np.frombuffer(buffer, np.uint8)
        address = int(array.__array_interface__["data"][0])
        for segment in self._segments:
            offset = address - segment.base
            if 0 <= offset <= segment.size - array.nbytes:
                return Place(self._process, segment.fd, segment.device, segment.inode, offset)
        return None

    def probe(self) -> Place | None:
        """A place by which a peer can find out whether it can read our memory."""
        block = self.take(1)
        return None if block is None else self.place(block)

    def close(self) -> None:
        """Take no more; what is in use stays readable here until it is let go."""
        if self._closed:
            return
        self._closed = True
        for segment in self._segments:
            os.close(segment.fd)
