"""Trace: what one process did with each slice, kept in memory and written as a Chrome trace.

Rules: nothing here reads a clock for an event, times come with it (CLOCK_MONOTONIC, seconds). What
is kept is bounded: the first spans, which show how a job starts, and the newest, which show how it
went on or ended; those between are dropped and counted. The file appears whole or not at all. Spans
of a kind overlap, and viewers want spans of a row nested: rows are dealt out when writing.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from gradsum.errors import ConfigError

FORMAT: Final = 1
FIRST: Final = 20_000
NEWEST: Final = 180_000
"""Spans that are kept of a process, from its beginning and before its end: about 60 MB in all."""

KINDS: Final = ("wait", "add", "gather", "queue", "push", "sum", "reply")
"""What a span shows, from the top row down."""

GAP: Final = 1e-8
"""Seconds between two spans of a row, so that they do not overlap in a viewer that rounds."""

log = logging.getLogger("gradsum.trace")


class SliceArgs(NamedTuple):
    """The slice that a span is about."""

    key: int
    slice: int
    version: int
    rank: int | None
    bytes: int
    priority: int
    server: int
    epoch: int


class WaitArgs(NamedTuple):
    """The tensor that a training thread waited for."""

    key: int
    version: int
    bytes: int
    priority: int


class Flow(NamedTuple):
    """One end of an arrow: "s" where a frame leaves, "f" where it arrives; ``ident`` pairs them."""

    end: str
    at: float
    direction: str
    ident: str


class Span(NamedTuple):
    """Something that took from ``start`` to ``end``."""

    kind: str
    name: str
    start: float
    end: float
    args: SliceArgs | WaitArgs
    flow: Flow | None = None


def arrow(run: str, incarnation: int, args: SliceArgs, rank: int, direction: str) -> str:
    """The name of a frame, the same at both of its ends and for its repetitions; run and
    incarnation tell jobs apart whose files lie in one folder."""
    frame = f"k{args.key}.{args.slice} v{args.version} r{rank}"
    return f"{run[:8]}.{incarnation} {frame} {direction}"


def clock_name() -> str:
    """The same text in processes whose monotonic clocks are one: boot id and time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = socket.gethostname()
    try:
        return f"{boot}/{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:  # a kernel without time namespaces
        return boot


class Trace:
    """One process's spans. ``number`` is its rank, or the server's number, once that is known."""

    def __init__(
        self, folder: Path, role: str, first: int = FIRST, newest: int = NEWEST
    ) -> None:
        """Raises ConfigError for a folder that cannot be written."""
        self.role = role
        self.number: int | None = None
        self._folder = folder
        self._room = first
        self._first: list[Span] = []
        self._newest: deque[Span] = deque(maxlen=newest)
        self._total = 0
        self._written = -1
        self._lock = threading.RLock()  # a signal handler may write while its thread records
        require_writable(folder)

    @classmethod
    def of(cls, folder: str | None, role: str) -> Trace | None:
        """The trace that the setting asks for."""
        return None if folder is None else cls(Path(folder), role)

    @property
    def dropped(self) -> int:
        """Spans recorded and not kept."""
        return self._total - len(self._first) - len(self._newest)

    def add(self, span: Span) -> None:
        """Record a span; any thread."""
        with self._lock:
            self._total += 1
            if len(self._first) < self._room:
                self._first.append(span)
            else:
                self._newest.append(span)

    def write(self) -> Path | None:
        """Write the file, unless nothing is new since; its path, None when there is none.

        What goes wrong is logged: a trace must not end what it watches.
        """
        with self._lock:
            if self.number is None or self._total == self._written:
                return None
            path = self._folder / f"{self.role}-{self.number}-{os.getpid()}.json"
            try:
                replace(path, self._lines())
            except OSError as error:
                log.error("the trace %s could not be written: %s", path, error.strerror)
                return None
            self._written = self._total
            return path

    def _lines(self) -> Iterator[str]:
        spans = [*self._first, *self._newest]
        about = {
            "format": FORMAT, "role": self.role, "number": self.number, "pid": os.getpid(),
            "host": socket.gethostname(), "clock": clock_name(),
            "wall_minus_clock": time.time() - time.monotonic(),
            "spans": len(spans), "dropped": self.dropped,
        }  # fmt: skip
        return document(about, events(spans, os.getpid(), f"{self.role} {self.number}"))


def require_writable(folder: Path) -> None:
    """Make the folder if need be; ConfigError unless a file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"trace: cannot write to the folder {folder}: {error.strerror}",
            hint="set GRADSUM_TRACE or --trace to a folder that this process may write",
        ) from None


def replace(path: Path, lines: Iterable[str]) -> None:
    """Write a file that appears whole, in place of an older one. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def document(about: dict[str, Any], found: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The lines of a Chrome trace: one event a line."""
    yield '{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about) + ', "traceEvents": ['
    comma = "\n"
    for event in found:
        yield comma + json.dumps(event)
        comma = ",\n"
    yield "\n]}\n"


def rows(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with the first row that is free when it starts; in order of their starts."""
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    count = 0
    for span in sorted(spans, key=lambda span: span.start):
        while taken and taken[0][0] + GAP <= span.start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if not free:
            free.append(count)
            count += 1
        row = heapq.heappop(free)
        heapq.heappush(taken, (span.end, row))
        yield row, span


def events(spans: list[Span], pid: int, process: str) -> Iterator[dict[str, Any]]:
    """Chrome's events: names of rows, complete events, and the ends of arrows inside them."""
    yield _label("process_name", pid, 0, process)
    tid = 0
    for kind in KINDS:
        base = tid
        for row, span in rows(span for span in spans if span.kind == kind):
            if base + row == tid:
                tid += 1
                yield _label("thread_name", pid, tid, f"{kind} {row}" if row else kind)
            yield from _rendered(span, pid, base + row + 1)


def _label(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _rendered(span: Span, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    start, end = microseconds(span.start), microseconds(span.end)
    args = {name: value for name, value in span.args._asdict().items() if value is not None}
    yield {
        "ph": "X", "name": span.name, "cat": span.kind, "pid": pid, "tid": tid, "ts": start,
        "dur": round(end - start, 3), "args": args,
    }  # fmt: skip
    flow = span.flow
    if flow is not None:
        found: dict[str, Any] = {
            "ph": flow.end, "name": flow.direction, "cat": "flow", "id": flow.ident, "pid": pid,
            "tid": tid, "ts": microseconds(flow.at),
        }  # fmt: skip
        yield found | {"bp": "e"} if flow.end == "f" else found


def microseconds(seconds: float) -> float:
    """Of a trace, to the nanosecond."""
    return round(seconds * 1e6, 3)
