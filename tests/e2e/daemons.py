"""A coordinator and servers as processes of their own, for tests that talk to real daemons.

Rules: ports are chosen by the daemons and published in port files; every wait has a limit; each
process is ended by its pid, and what a test left running is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from gradsum import config

START = 20.0
"""Seconds for a process to come up on a busy machine."""

QUICK = {
    "GRADSUM_HEARTBEAT": "0.2",
    "GRADSUM_SUSPECT": "1",
    "GRADSUM_LEASE": "3",
    "GRADSUM_STALL_WARNING": "1",
}
"""Settings that make losses show within seconds; workers learn lease and heartbeat at Hello."""

OTHERS = ("GRADSUM_", "SLURM_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "JOB_COMPLETION")
"""Variables of the developer's own that must not reach the processes."""


def until(condition: Callable[[], object], limit: float, what: str) -> float:
    """Poll until the condition holds; the seconds that it took. Fails after ``limit``."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > limit:
            pytest.fail(f"not within {limit:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - start


class Process:
    """A started process whose output goes to files, so that it can be read while it runs."""

    def __init__(self, folder: Path, name: str, words: Sequence[str], env: dict[str, str]) -> None:
        self.name = name
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.popen = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=folder,
                env={k: v for k, v in os.environ.items() if not k.startswith(OTHERS)} | env,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def out(self) -> str:
        """What it has written to stdout."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it has written to stderr."""
        return self._err.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    @property
    def rss(self) -> int:
        """Bytes of memory in use."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def wait(self, limit: float) -> int:
        """Its exit code; fails when it runs on."""
        try:
            return self.popen.wait(limit)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.name} still runs after {limit:g} s: {self.err[-2000:]}")

    def says(self, text: str, limit: float) -> float:
        """Wait for a text on stderr; the seconds that it took."""
        return until(lambda: text in self.err, limit, f"{self.name} says {text!r}: {self.err}")

    def end(self) -> None:
        """Whatever it takes."""
        if self.running:
            self.popen.terminate()
            try:
                self.popen.wait(5.0)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(5.0)


class Daemons:
    """Starts daemons and workers in a folder; ``close`` ends all that still run."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self._env = env
        self.address = ""
        self.coordinator: Process | None = None
        self.servers: list[Process] = []
        self._started: list[Process] = []

    def spawn(self, name: str, words: Sequence[str], **env: str) -> Process:
        """Start any process."""
        unique = f"{name}-{len(self._started)}"
        process = Process(self.folder, unique, words, self._env | env)
        self._started.append(process)
        return process

    def gradsum(self, name: str, *words: str, **env: str) -> Process:
        """Start a gradsum command."""
        return self.spawn(name, [sys.executable, "-m", "gradsum", *words], **env)

    def start(self, workers: int, servers: int, expected_servers: int | None = None) -> Daemons:
        """A coordinator and its servers, once all have said where they listen."""
        file = self.folder / "coordinator.address"
        file.unlink(missing_ok=True)
        self.coordinator = self.gradsum(
            "coordinator", "coordinator", "--bind", "127.0.0.1:0", "--workers", str(workers),
            "--servers", str(expected_servers or servers), "--port-file", str(file),
        )  # fmt: skip
        until(file.exists, START, "the coordinator listens")
        self.address = file.read_text().strip()
        for _ in range(servers):
            self.add_server()
        return self

    def add_server(self, *options: str) -> Process:
        """One more server, once it has a place."""
        server = self.gradsum("server", "server", "--coordinator", self.address, *options)
        server.says(" ready on ", START)
        self.servers.append(server)
        return server

    def worker(self, rank: int, size: int, *acts: str, **env: str) -> Process:
        """A plain_worker process."""
        script = str(Path(__file__).with_name("plain_worker.py"))
        place = {
            "GRADSUM_COORDINATOR": self.address, "RANK": str(rank), "WORLD_SIZE": str(size),
        }  # fmt: skip
        return self.spawn(f"w{rank}", [sys.executable, script, *acts], **place, **env)

    def settings(self, rank: int | None, size: int | None, **more: object) -> config.Settings:
        """What a worker inside the test itself is started with."""
        flags = {"coordinator": self.address, "rank": rank, "world_size": size, **more}
        return config.load(flags, {})

    @property
    def all(self) -> list[Process]:
        """The daemons, coordinator first."""
        return [*([self.coordinator] if self.coordinator else []), *self.servers]

    @property
    def alive(self) -> bool:
        """Every daemon runs."""
        return all(process.running for process in self.all)

    def close(self) -> None:
        """End everything, workers first."""
        for process in reversed(self._started):
            process.end()


@contextmanager
def running(
    folder: Path, workers: int, servers: int, expected_servers: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Daemons]:  # fmt: skip
    """Daemons that are ended at the end."""
    daemons = Daemons(folder, **(env or {}))
    try:
        yield daemons.start(workers, servers, expected_servers)
    finally:
        daemons.close()
