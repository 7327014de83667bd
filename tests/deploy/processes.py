"""Processes of a test, and the proof that none of them or of their descendants is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

LIMIT = 45.0


class Processes:
    """Starts processes in a folder; all their descendants carry a marker in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._marker = f"TEST_MARKER={uuid.uuid4().hex}"
        self._started: list[subprocess.Popen[str]] = []

    def spawn(self, words: Sequence[str], **env: str) -> subprocess.Popen[str]:
        """Start a process, its output in pipes."""
        name, _, value = self._marker.partition("=")
        process = subprocess.Popen(
            words, env=os.environ | {name: value} | env, cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def gradsum(self, *words: str, **env: str) -> subprocess.Popen[str]:
        """Start a gradsum command."""
        return self.spawn([sys.executable, "-m", "gradsum", *words], **env)

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Its exit code, stdout and stderr once it has ended."""
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, out, err

    def alive(self, words: str = "") -> list[int]:
        """Live processes that carry the marker and have ``words`` in their command line."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                marked = self._marker.encode() in (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue
            if marked and words.encode() in command:
                found.append(int(entry.name))
        return found

    def close(self) -> None:
        """Kill what is left, and fail if anything was."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=LIMIT)
        left = self.alive()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "processes left behind"
