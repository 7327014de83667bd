"""``gradsum trace merge``: the timelines of many processes as one, on one clock.

Rules: a file that cannot be used is named, left out, and makes the exit code 1; the others are
merged. Arrows are kept where both of their ends are. The reference is the lowest rank's clock.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gradsum.deploy.clocks import Offset, bounds, offsets
from gradsum.deploy.status import columns
from gradsum.errors import ConfigError
from gradsum.trace import FORMAT, document, microseconds, replace

NAME: Final = re.compile(r"(?:worker|server)-\d+-\d+\.json")
MERGED: Final = "timeline.json"
_TEXTS: Final = ("role", "host", "clock")
_NUMBERS: Final = ("number", "pid", "wall_minus_clock", "spans", "dropped")

Event = dict[str, Any]
Ends = dict[str, Event]


@dataclass(frozen=True, slots=True)
class Source:
    """The file of one process."""

    path: Path
    about: dict[str, Any]
    events: list[Event]

    @property
    def name(self) -> str:
        """Such as "worker 0"."""
        return f"{self.about['role']} {self.about['number']}"

    @property
    def order(self) -> tuple[bool, int, int]:
        """Workers by rank, then servers."""
        return self.about["role"] != "worker", self.about["number"], self.about["pid"]

    def ends(self, end: str) -> Ends:
        """The ends of arrows of one sort, by their names."""
        return {event["id"]: event for event in self.events if event["ph"] == end}


@dataclass(frozen=True, slots=True)
class Arrow:
    """A frame that both of its ends have seen."""

    source: Source
    departure: Event
    target: Source
    arrival: Event


def merge(folder: Path, out: Path | None, *, as_json: bool) -> int:
    """Write the merged timeline and say what is in it; 1 when a file had to be left out.

    Raises ConfigError for a folder without timelines, and for a place that cannot be written.
    """
    sources, skipped = gather(folder)
    for path, why in skipped.items():
        print(f"gradsum: skipped {path}: {why}", file=sys.stderr)
    if not sources:
        return 1
    out = out or folder / MERGED
    arrows, found = pair(sources), clocks(sources)
    try:
        replace(out, document({"format": FORMAT}, combined(sources, arrows, found)))
    except OSError as error:
        raise ConfigError(
            f"cannot write {out}: {error.strerror}", hint="--out names a file that can be written"
        ) from None
    ends = sum(len(source.ends(end)) for source in sources for end in "sf")
    summary = {
        "out": str(out),
        "processes": [_described(source, found[source.about["clock"]]) for source in sources],
        "arrows": len(arrows),
        "ends_without_arrow": ends - 2 * len(arrows),
        "skipped": {str(path): why for path, why in skipped.items()},
    }
    print(json.dumps(summary, indent=2) if as_json else "\n".join(_lines(summary)))
    return int(bool(skipped))


def gather(folder: Path) -> tuple[list[Source], dict[Path, str]]:
    """The timelines in a folder, and what is wrong with those that cannot be used."""
    hint = "name the folder that GRADSUM_TRACE named while the job ran"
    try:
        paths = sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))
    except OSError as error:
        raise ConfigError(f"cannot read the folder {folder}: {error.strerror}", hint=hint) from None
    if not paths:
        raise ConfigError(f"there are no timelines in {folder}", hint=hint)
    sources: list[Source] = []
    skipped: dict[Path, str] = {}
    for path in paths:
        try:
            sources.append(read(path))
        except OSError as error:
            skipped[path] = error.strerror or str(error)
        except ValueError as error:
            skipped[path] = str(error)
    return sorted(sources, key=lambda source: source.order), skipped


def read(path: Path) -> Source:
    """One file; ValueError says what is wrong with it."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"not JSON, perhaps cut off: {error}") from None
    about = whole.get("otherData") if isinstance(whole, dict) else None
    events = whole.get("traceEvents") if isinstance(whole, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"not a timeline of gradsum, format {FORMAT}")
    texts = all(isinstance(about.get(name), str) for name in _TEXTS)
    numbers = all(type(about.get(name)) in (int, float) for name in _NUMBERS)
    if not texts or not numbers or not isinstance(events, list) or not all(map(_whole, events)):
        raise ValueError("a timeline with fields that are missing or wrong")
    return Source(path, about, events)


def _whole(event: object) -> bool:
    """Whether an event has what merging touches."""
    if not isinstance(event, dict) or type(event.get("pid")) is not int:
        return False
    if event.get("ph") == "M":
        return isinstance(event.get("args"), dict)
    timed = type(event.get("ts")) in (int, float)
    return timed and (event.get("ph") == "X" or isinstance(event.get("id"), str))


def pair(sources: Sequence[Source]) -> list[Arrow]:
    """Arrows with both ends, in the order of their names."""
    starts = {name: (s, event) for s in sources for name, event in s.ends("s").items()}
    stops = {name: (s, event) for s in sources for name, event in s.ends("f").items()}
    return [Arrow(*starts[name], *stops[name]) for name in sorted(starts.keys() & stops.keys())]


def clocks(sources: Sequence[Source]) -> dict[str, Offset]:
    """The offset of each clock to that of the first source."""
    least = bounds(
        (
            arrow.source.about["clock"], arrow.departure["ts"] / 1e6,
            arrow.target.about["clock"], arrow.arrival["ts"] / 1e6,
        )
        for arrow in pair(sources)
    )  # fmt: skip
    walls = {source.about["clock"]: source.about["wall_minus_clock"] for source in sources}
    return offsets(sources[0].about["clock"], walls, least)


def combined(
    sources: Sequence[Source], arrows: Sequence[Arrow], found: dict[str, Offset]
) -> Iterator[Event]:
    """All events by the reference clock, from 0 on; processes and arrows are numbered anew."""
    numbers = {arrow.departure["id"]: number for number, arrow in enumerate(arrows, 1)}
    shifts = [microseconds(found[source.about["clock"]].seconds) for source in sources]
    begin = min(
        (event["ts"] - shift for source, shift in zip(sources, shifts, strict=True)
         for event in source.events if "ts" in event),
        default=0.0,
    )  # fmt: skip
    for pid, (source, shift) in enumerate(zip(sources, shifts, strict=True), 1):
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for event in source.events:
            if event["ph"] in ("s", "f") and event["id"] not in numbers:
                continue
            moved = event | {"pid": pid}
            if event.get("name") == "process_name" and event["ph"] == "M":
                moved["args"] = {"name": f"{source.name} on {source.about['host']}"}
            if "ts" in event:
                moved["ts"] = round(event["ts"] - shift - begin, 3)
            if "id" in event:
                moved["id"] = numbers[event["id"]]
            yield moved


def _described(source: Source, offset: Offset) -> dict[str, Any]:
    about = source.about
    return {
        "name": source.name, "host": about["host"], "pid": about["pid"], "spans": about["spans"],
        "dropped": about["dropped"], "offset": offset.seconds, "error": offset.error,
        "offset_by": offset.by,
    }  # fmt: skip


def _lines(summary: dict[str, Any]) -> Iterator[str]:
    """What people read."""
    yield from columns(
        ("process", "host", "pid", "spans", "dropped", "clock ahead s", "error s", "by"),
        [
            (p["name"], p["host"], p["pid"], p["spans"], p["dropped"], f"{p['offset']:.6f}",
             "-" if p["error"] is None else f"{p['error']:.6f}", p["offset_by"])
            for p in summary["processes"]
        ],
    )  # fmt: skip
    yield ""
    yield f"arrows   {summary['arrows']}, {summary['ends_without_arrow']} ends without the other"
    yield f"written  {summary['out']}: open it at https://ui.perfetto.dev"
