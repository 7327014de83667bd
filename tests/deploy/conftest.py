"""Processes, and a real coordinator for the commands that ask one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deploy.processes import Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts processes; none may be left at the end."""
    found = Processes(tmp_path)
    yield found
    found.close()


@pytest.fixture
def coordinator(processes: Processes, tmp_path: Path, eventually: Callable[..., None]) -> str:
    """HOST:PORT of a coordinator that waits for 2 workers and 1 server."""
    file = tmp_path / "address"
    words = ("coordinator", "--bind", "127.0.0.1:0", "--workers", "2", "--servers", "1")
    processes.gradsum(*words, "--port-file", str(file))
    eventually(file.exists, limit=20.0, what="the coordinator's port file")
    return file.read_text().strip()
