"""The output of many processes on one terminal: whole lines, each with the name of its speaker.

Rules: a line is never torn and never merged with another; stdout goes to stdout, stderr to stderr.
What a progress bar overwrites (``\\r``) is not a line. Rank 0's bar is redrawn in place on a
terminal, and shown as a line now and then elsewhere; of the other ranks' bars only the last state
is shown. A line that already carries a name, such as a log line, gets no second one.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import BinaryIO

MAX_LINE = 1 << 20
BAR_INTERVAL = 10.0
_NAMED = re.compile(rb"\[(w\d+|s\d+|coordinator)\] ")
_UNNUMBERED = re.compile(rb"\[(w|server)\] ")  # before it knows its number: the label does
_CLEAR = b"\r\x1b[K"


class Lines:
    """Cuts a stream of bytes into lines; what is not ended yet may be a progress bar."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their ends and without overwritten parts."""
        *whole, rest = (self._rest + data).split(b"\n")
        head, overwritten, last = rest.rpartition(b"\r")
        if overwritten:  # keep one overwritten state: the new one may still be empty
            rest = b"\r" + (last or head.rpartition(b"\r")[2] + b"\r")
        if len(rest) > MAX_LINE:
            whole, rest = [*whole, rest], b""
        self._rest = rest
        return [_final(line) for line in whole]

    @property
    def bar(self) -> bytes | None:
        """The text that a progress bar shows now, None where there is none."""
        return _final(self._rest) if b"\r" in self._rest else None

    def close(self) -> list[bytes]:
        """What came after the last line end, if anything."""
        rest, self._rest = _final(self._rest), b""
        return [rest] if rest.strip() else []


def _final(line: bytes) -> bytes:
    """What a terminal would show of a line in the end."""
    parts = line.rstrip(b"\r").split(b"\r")
    return parts[-1] if parts else b""


class Console:
    """The launcher's own stdout and stderr."""

    def __init__(
        self, stdout: BinaryIO, stderr: BinaryIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._streams = {1: stdout, 2: stderr}
        self._terminal = {number: stream.isatty() for number, stream in self._streams.items()}
        self._clock = clock
        self._bar: tuple[int, bytes] | None = None  # stream and text of the bar on the screen
        self._bar_time = -BAR_INTERVAL

    def line(self, stream: int, label: str, text: bytes) -> None:
        """One line; a bar on the screen moves down."""
        bar = self._bar
        if unnumbered := _UNNUMBERED.match(text):
            text = text[unnumbered.end() :]
        prefix = b"" if _NAMED.match(text) else f"[{label}] ".encode()
        if bar:
            self._write(bar[0], _CLEAR)
        self._write(stream, prefix + text + b"\n")
        if bar:
            self._write(bar[0], bar[1])

    def bar(self, stream: int, label: str, text: bytes | None) -> None:
        """Show a progress bar's new state; None or blanks remove it."""
        if text is None or not text.strip():
            if self._bar and self._bar[0] == stream:
                self._bar = None
                self._write(stream, _CLEAR)
        elif self._terminal[stream]:
            width = _width(self._streams[stream]) - 1
            shown = f"[{label}] {text.decode(errors='replace').rstrip()}"[:width]
            self._bar = (stream, shown.encode())
            self._write(stream, _CLEAR + self._bar[1])
        elif self._clock() - self._bar_time >= BAR_INTERVAL:
            self._bar_time = self._clock()
            self.line(stream, label, text.rstrip())

    def note(self, text: str) -> None:
        """A line of the launcher's own, to stderr."""
        if self._bar:
            self._write(self._bar[0], _CLEAR)
            self._bar = None
        self._write(2, f"gradsum launch: {text}\n".encode())

    def _write(self, number: int, data: bytes) -> None:
        try:
            self._streams[number].write(data)
            self._streams[number].flush()
        except (BrokenPipeError, ValueError):  # the reader has gone: the job goes on without it
            self._streams[number] = open(os.devnull, "wb")


def _width(stream: BinaryIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80
