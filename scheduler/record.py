"""What tuning found for a job, as the tune_file keeps it.

Rules: one file, one entry for each fingerprint: the table's digest and how many workers and servers
there were, since each of them makes another surface. An entry that makes no sense makes the whole
file broken; who reads it says so. No I/O: bytes in, bytes out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gradsum.proto.limits import MAX_INT, MAX_SLICE
from gradsum.scheduler.tuner import WINDOWS, Setting

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Record:
    """The setting that a job settled on and how long its steps took with it."""

    fingerprint: str
    setting: Setting
    seconds: float
    state: str
    points: int  # settings that were tried


def fingerprint(digest: bytes, workers: int, servers: int) -> str:
    """What two jobs must share for one's findings to be the other's first guess."""
    return f"{digest.hex()}-{workers}w-{servers}s"


def dump(records: Mapping[str, Record]) -> str:
    """The file's text."""
    jobs = {
        key: {**r.setting._asdict(), "seconds": r.seconds, "state": r.state, "points": r.points}
        for key, r in sorted(records.items())
    }
    return json.dumps({"version": VERSION, "jobs": jobs}, indent=2) + "\n"


def parse(text: str) -> dict[str, Record]:
    """The records of a file's text; ValueError says what is wrong with it."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(whole, dict) or whole.get("version") != VERSION:
        raise ValueError(f"it is no tune_file of version {VERSION}")
    jobs = whole.get("jobs")
    if not isinstance(jobs, dict):
        raise ValueError("it has no jobs")
    return {key: _record(key, entry) for key, entry in jobs.items()}


def _record(key: str, entry: Any) -> Record:
    match entry:
        case {"slice_bytes": int(size), "window": int(window), "pack_bytes": int(pack),
              "seconds": float(seconds), "state": str(state), "points": int(points)}:  # fmt: skip
            usable = 1 <= size <= MAX_SLICE and 0 <= pack <= MAX_INT
            if usable and 1 <= window <= max(WINDOWS) and 0 < seconds < math.inf:
                return Record(key, Setting(size, window, pack), seconds, state, points)
    raise ValueError(f"the entry of job {key[:80]!r} makes no sense")
