"""Telling glibc to keep freed memory instead of giving it back to the kernel (DESIGN 7).

Fresh pages cost more than the sum: the first touch of 4 MiB is ~50 times slower than warm memory,
and every received slice is such memory when the allocator returns it after each use.
"""

from __future__ import annotations

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_MMAP_ABOVE: Final = 32 << 20  # the most that glibc takes
_KEEP: Final = 1 << 30


def keep_freed_memory() -> bool:
    """Raise the thresholds, and let all threads share one arena: the thread that receives takes
    what another has freed. False where the libc has no mallopt."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    options = [(_M_MMAP_THRESHOLD, _MMAP_ABOVE), (_M_TRIM_THRESHOLD, _KEEP), (_M_ARENA_MAX, 1)]
    taken = [bool(mallopt(*option)) for option in options]  # each of them, whatever the others say
    return all(taken)
