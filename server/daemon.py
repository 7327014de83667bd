"""The server process: signals, and one process per shard."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from gradsum.config import Settings
from gradsum.errors import ConfigError
from gradsum.proto.transport.memory import keep_freed_memory
from gradsum.server.shard import Shard

_GRACE: Final = 5.0


def run(settings: Settings, shards: int, once: bool, port_file: Path | None = None) -> int:
    """Serve until SIGTERM, or with ``once`` for one job; the exit code.

    port_file: where the data address is written once it is bound (one shard only).
    """
    if shards < 1:
        raise ConfigError(f"--shards {shards}", hint="at least 1; one a core is a good choice")
    if settings.coordinator is None:
        raise ConfigError("no coordinator", hint="--coordinator HOST:PORT")
    if shards > 1:
        return _supervise(shards)
    keep_freed_memory()
    shard = Shard(settings, once)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: shard.stop())
    if port_file is not None:
        partial = port_file.with_suffix(".part")
        partial.write_text(f"{shard.address}\n")
        partial.rename(port_file)
    sys.stdout.write(f"server ready on {shard.address}\n")
    sys.stdout.flush()
    return shard.run()


def _supervise(shards: int) -> int:
    """One process a shard, started with the same arguments; the first failure ends all."""
    command = [sys.executable, "-m", "gradsum", *_single(sys.argv[1:]), "--shards", "1"]
    children = [subprocess.Popen(command) for _ in range(shards)]

    def forward(number: int, frame: object) -> None:
        for child in children:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    codes: list[int] = []
    while len(codes) < shards and not any(codes):
        codes = [code for child in children if (code := child.poll()) is not None]
        time.sleep(0.1)
    _end(children)
    return max((abs(child.returncode) for child in children), default=0)


def _single(arguments: list[str]) -> list[str]:
    """The arguments with --shards taken out."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--shards":
            skip = True
        elif not argument.startswith("--shards="):
            kept.append(argument)
    return kept


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.terminate()
    for child in children:
        try:
            child.wait(_GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(_GRACE)
