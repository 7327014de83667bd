"""Mappings: other processes' segments, read-only (DESIGN 7).

Nothing that a peer says is believed: a segment is mapped only if it is the very file that the place
names, is sealed against shrinking (a shrunk mapping kills its reader), and belongs to our user; and
nothing beyond its end is read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from typing import Final

from gradsum.errors import ProtocolError
from gradsum.proto.local import Place

MOST: Final = 4096
"""Segments that one process maps; a peer that names ever new ones is refused."""

_Key = tuple[int, int, int, int]


class Mappings:
    """Views of peers' memory; one thread."""

    __slots__ = ("_maps", "_most")

    def __init__(self, most: int = MOST) -> None:
        self._maps: dict[_Key, memoryview] = {}
        self._most = most

    def view(self, place: Place, length: int) -> memoryview:
        """The ``length`` bytes at a place, read-only; they stay mapped as long as the view lives.

        Raises ProtocolError saying why it cannot be read.
        """
        key = place[:4]
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) >= self._most:
                raise ProtocolError(f"more than {self._most} segments of shared memory")
            found = self._maps[key] = _map(place)
        if place.offset + length > len(found):
            raise ProtocolError(
                f"{length} bytes at {place.offset} of a segment of {len(found)}",
                peer=f"process {place.pid}",
            )
        return found[place.offset : place.offset + length]

    def forget(self) -> None:
        """Unmap all, once their views are gone: the memory of processes that have ended, too."""
        self._maps.clear()


def _map(place: Place) -> memoryview:
    path = f"/proc/{place.pid}/fd/{place.fd}"
    try:
        # Looked at before it is opened: opening a device or a pipe of somebody has effects.
        _require_segment(os.stat(path), place)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _refusal(place, f"cannot be opened: {error.strerror}") from None
    try:
        known = os.fstat(fd)
        _require_segment(known, place)
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise _refusal(place, "is not sealed against shrinking")
        return memoryview(mmap.mmap(fd, known.st_size, prot=mmap.PROT_READ))
    except (OSError, ValueError) as error:  # no memfd has no seals; an empty one cannot be mapped
        raise _refusal(place, f"cannot be mapped: {error}") from None
    finally:
        os.close(fd)


def _require_segment(known: os.stat_result, place: Place) -> None:
    if not stat.S_ISREG(known.st_mode):
        raise _refusal(place, "is no memory")
    if (known.st_dev, known.st_ino) != (place.device, place.inode):
        raise _refusal(place, "is another file than the one named")
    if known.st_uid != os.getuid():
        raise _refusal(place, "belongs to another user")


def _refusal(place: Place, why: str) -> ProtocolError:
    return ProtocolError(
        f"segment {place.fd} of process {place.pid} {why}", peer=f"process {place.pid}"
    )
