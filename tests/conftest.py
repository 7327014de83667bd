"""Fixtures for every test. Nothing heavy is imported here: most tests need no torch and no zmq."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture(autouse=True)
def _no_inherited_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own GRADSUM_* and launcher variables must not change what a test sees."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    prefixes = ("GRADSUM_", "SLURM_", "TORCHELASTIC_", "JOB_COMPLETION_INDEX")
    for name in list(os.environ):
        if name in launcher or name.startswith(prefixes):
            monkeypatch.delenv(name)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """``eventually(condition, limit=5.0)``: poll until true, or fail after ``limit`` seconds."""

    def poll(condition: Callable[[], object], limit: float = 5.0, what: str = "condition") -> None:
        deadline = time.monotonic() + limit
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"{what} not true within {limit} s")
            time.sleep(0.01)

    return poll


def _open_files() -> dict[str, str]:
    """Descriptor -> target of what this process has open, sockets and memfds included."""
    folder, found = "/proc/self/fd", {}
    for name in os.listdir(folder):
        try:
            found[name] = os.readlink(f"{folder}/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Opt in: the test must end with the threads and descriptors that it began with."""
    gc.collect()
    threads, files = set(threading.enumerate()), _open_files()

    def left() -> list[str]:
        gc.collect()
        names = [t.name for t in threading.enumerate() if t not in threads]
        return names + [where for fd, where in _open_files().items() if files.get(fd) != where]

    yield
    deadline = time.monotonic() + 5.0
    while left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left(), "threads or descriptors left behind"
