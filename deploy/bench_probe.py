"""What this machine can do without gradsum, probed right before a run: a TCP stream, and memory.

The stream runs over loopback between this process and another; memory is copied and added in one
thread, 64 MiB at a time, so out of every cache. A copy's rate is the bytes copied by the time, an
addition's the bytes of the sum: memory moves two and three times as much.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from gradsum.proto.transport.probe import StreamProbe, send_stream

_SECONDS: Final = 0.5
_MEMORY: Final = 64 << 20
_REPEATS: Final = 5
_ENDING: Final = 10.0  # seconds for the sender to end


class Probe(NamedTuple):
    """10^9 bytes per second."""

    stream_gb_per_second: float
    copy_gb_per_second: float
    add_gb_per_second: float


def probe() -> Probe:
    """Takes about a second. Raises Unreachable if the stream does not come about."""
    source = np.ones(_MEMORY // 4, dtype=np.float32)
    target = source.copy()
    return Probe(
        stream_rate(_SECONDS) / 1e9,
        _memory_rate(lambda: np.copyto(target, source)) / 1e9,
        _memory_rate(lambda: np.add(target, source, out=target)) / 1e9,
    )


def stream_rate(seconds: float) -> float:
    """Bytes per second of a TCP stream from another process."""
    with StreamProbe() as receiver:
        words = ["-m", "gradsum.deploy.bench_probe", str(receiver.port), str(seconds)]
        with subprocess.Popen([sys.executable, *words], stderr=subprocess.DEVNULL) as sender:
            try:
                found = receiver.rate()
                sender.wait(_ENDING)
                return found
            finally:
                sender.kill()


def _memory_rate(pass_over: Callable[[], object]) -> float:
    pass_over()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        pass_over()
        times.append(time.perf_counter() - start)
    return _MEMORY / statistics.median(times)


if __name__ == "__main__":
    send_stream(int(sys.argv[1]), float(sys.argv[2]))
