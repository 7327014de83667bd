"""A worker without torch: joins the job, then does what its arguments say, one after the other.

sum:NAME:ELEMENTS  push rank + 1 + index and print the sum;  print:TEXT;  touch:FILE;  await:FILE
exit:RANK:CODE, raise:RANK, kill:RANK  on that rank only;  barrier;  push:NAME  without waiting
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from gradsum import config
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import TensorSpec
from gradsum.worker.session import Session


class Into:
    """A sink that copies into an array."""

    def __init__(self, array: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
        self.bytes = array.data.cast("B")

    def write(self, offset: int, payload: memoryview, members: int, exponent: int) -> None:
        assert exponent == 0
        self.bytes[offset : offset + payload.nbytes] = payload


def submit(session: Session, name: str, elements: int, turn: int):  # type: ignore[no-untyped-def]
    """Push one float32 tensor; its handle and where the sum goes."""
    spec = TensorSpec(name, "float32", "float32", (elements,), Policy(), 1)
    (key,) = session.register([spec])
    source = np.arange(elements, dtype=np.float32) + (session.rank + 1)
    result = np.zeros_like(source)
    handle = session.submit(key, turn, source.data.cast("B"), Into(result))
    return handle, result, source


def act(session: Session, word: str, turn: int) -> None:
    name, *rest = word.split(":")
    mine = name in ("exit", "raise", "kill") and session.rank == int(rest[0])
    if name == "sum":
        handle, result, _ = submit(session, rest[0], int(rest[1]), turn)
        handle.wait(30.0)
        print("sum", result.tolist())
    elif name == "push":
        submit(session, rest[0], int(rest[1]), turn)
    elif name == "print":
        print(rest[0])
    elif name == "touch":
        Path(rest[0]).touch()
    elif name == "await":
        deadline = time.monotonic() + 30.0
        while not Path(rest[0]).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    elif name == "barrier":
        session.barrier()
    elif mine and name == "exit":
        sys.exit(int(rest[1]))
    elif mine and name == "raise":
        raise ValueError("boom")
    elif mine:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    session = Session.open(config.load({}, os.environ))
    atexit.register(session.close)
    counts: dict[str, int] = {}
    for word in sys.argv[1:]:
        counts[word] = counts.get(word, 0) + 1
        act(session, word, counts[word])


if __name__ == "__main__":
    main()
