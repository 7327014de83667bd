"""A real coordinator process for the commands that ask one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def coordinator(tmp_path: Path, eventually: Callable[..., None]) -> Iterator[str]:
    """HOST:PORT of a coordinator that waits for 2 workers and 1 server."""
    file = tmp_path / "address"
    words = ("coordinator", "--bind", "127.0.0.1:0", "--workers", "2", "--servers", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "gradsum", *words, "--port-file", str(file)],
        stdout=subprocess.DEVNULL,
    )
    try:
        eventually(file.exists, limit=20.0, what="the coordinator's port file")
        yield file.read_text().strip()
    finally:
        process.terminate()
        try:
            process.wait(10)
        finally:
            process.kill()
