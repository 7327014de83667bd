"""The goodput of a lab's links: a plain TCP stream between two nodes, one way or both at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from benchmarks.links import Lab

SECONDS: Final = 1.5
_WITHIN: Final = 30.0
_RECEIVE: Final = """
import sys
from gradsum.proto.transport.probe import StreamProbe
with StreamProbe(sys.argv[1]) as probe:
    print(probe.port, flush=True)
    print(probe.rate())
"""
_SEND: Final = """
import sys
from gradsum.proto.transport.probe import send_stream
send_stream(int(sys.argv[2]), float(sys.argv[3]), sys.argv[1])
"""


def _start(lab: Lab, node: str, program: str, *words: str) -> subprocess.Popen[str]:
    command = lab.command(node, [sys.executable, "-c", program, *words])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def rates(lab: Lab, pairs: Sequence[tuple[str, str]], seconds: float = SECONDS) -> list[float]:
    """Bytes per second of a stream for each (from, to), all at the same time."""
    receivers = [_start(lab, to, _RECEIVE, lab.address(to)) for _, to in pairs]
    senders: list[subprocess.Popen[str]] = []
    try:
        for (source, to), receiver in zip(pairs, receivers, strict=True):
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
            senders.append(_start(lab, source, _SEND, lab.address(to), port, str(seconds)))
        return [float(receiver.communicate(timeout=_WITHIN)[0]) for receiver in receivers]
    finally:
        for process in (*receivers, *senders):
            process.kill()
            process.communicate()


def link(lab: Lab) -> float:
    """The goodput of the lab's links: two nodes send to each other; the slower way counts."""
    one, other = lab.nodes[:2]
    return min(rates(lab, [(one, other), (other, one)]))
