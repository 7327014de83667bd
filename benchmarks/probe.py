"""The goodput of a lab's links: a plain TCP stream between two nodes, one way or both at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

from benchmarks.links import Lab

SECONDS: Final = 1.5
_WITHIN: Final = 30.0
_RECEIVE: Final = """
import sys
from gradsum.proto.transport.probe import StreamProbe
with StreamProbe(sys.argv[1]) as probe:
    print(probe.port, flush=True)
    print(probe.rate(), probe.nbytes)
"""
_SEND: Final = """
import sys
from gradsum.proto.transport.probe import send_stream
send_stream(int(sys.argv[2]), float(sys.argv[3]), sys.argv[1])
"""


class Stream(NamedTuple):
    """Bytes per second, and bytes in all."""

    rate: float
    nbytes: int


class Link(NamedTuple):
    """Of a lab's nodes: goodput in bytes/s, and bytes at an interface for a byte of payload."""

    goodput: float
    overhead: float


def _start(lab: Lab, node: str, program: str, *words: str) -> subprocess.Popen[str]:
    command = lab.command(node, [sys.executable, "-c", program, *words])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def streams(
    lab: Lab, pairs: Sequence[tuple[str, str]], seconds: float = SECONDS
) -> list[Stream]:
    """A stream for each (from, to), all at the same time."""
    receivers = [_start(lab, to, _RECEIVE, lab.address(to)) for _, to in pairs]
    senders: list[subprocess.Popen[str]] = []
    try:
        for (source, to), receiver in zip(pairs, receivers, strict=True):
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
            senders.append(_start(lab, source, _SEND, lab.address(to), port, str(seconds)))
        said = [receiver.communicate(timeout=_WITHIN)[0].split() for receiver in receivers]
        return [Stream(float(rate), int(nbytes)) for rate, nbytes in said]
    finally:
        for process in (*receivers, *senders):
            process.kill()
            process.communicate()


def link(lab: Lab) -> Link:
    """Two nodes send to each other; the slower way counts."""
    pair = lab.nodes[:2]
    before = [lab.counters(node) for node in pair]
    found = streams(lab, [(pair[0], pair[1]), (pair[1], pair[0])])
    sent = sum(lab.counters(node).sent - old.sent for node, old in zip(pair, before, strict=True))
    return Link(min(each.rate for each in found), sent / sum(each.nbytes for each in found))
