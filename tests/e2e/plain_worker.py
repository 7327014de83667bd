"""A worker without torch: ``Plain`` inside a test, or a process that does what its arguments say.

sum:NAME  push 4 numbers that depend on rank and turn, check the sum;  only:RANK:ACT  on one rank
raise:TEXT;  wait:SECONDS  without a call of gradsum;  touch:FILE;  await:FILE;  leave
forever:NAME  sums without end
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsum import config, log
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import TensorSpec
from gradsum.worker.handle import Handle
from gradsum.worker.session import Session

Array = npt.NDArray[Any]


def spec(
    name: str, *shape: int, dtype: str = "float32", first: int = 1, **policy: Any
) -> TensorSpec:
    """A tensor; further arguments are fields of its policy."""
    return TensorSpec(name, dtype, dtype, shape, Policy(**policy), first)


class Into:
    """A sink that copies a sum into an array."""

    def __init__(self, array: Array) -> None:
        self._bytes = array.data.cast("B")

    def write(self, offset: int, payload: memoryview, members: int, exponent: int) -> None:
        if exponent:
            raise ValueError(f"exponent {exponent} of a float32 sum")
        self._bytes[offset : offset + payload.nbytes] = payload


class Push:
    """A push on its way; ``result`` holds the sum after ``wait``."""

    def __init__(self, session: Session, key: int, version: int, values: Array) -> None:
        self._source = np.ascontiguousarray(values)
        self.result = np.full_like(self._source, 99)
        self.handle: Handle = session.submit(
            key, version, self._source.reshape(-1).data.cast("B"), Into(self.result.reshape(-1))
        )

    def wait(self, limit: float | None = 20.0) -> Array:
        """The sum; limit None: the setting stall_timeout."""
        self.handle.wait(limit)
        return self.result


class Plain:
    """A session that pushes numpy arrays by name."""

    def __init__(self, settings: config.Settings) -> None:
        self.session = Session.open(settings)
        self._turns: dict[str, int] = {}
        self._keys: dict[TensorSpec, int] = {}

    def register(self, *specs: TensorSpec, group: str = "") -> list[int]:
        keys = self.session.register(specs, group)
        self._keys.update(zip(specs, keys, strict=True))
        return keys

    def push(self, name: str, values: Array, **policy: Any) -> Push:
        """Begin the next round of a tensor, registered at its first use."""
        wanted = spec(name, *values.shape, dtype=values.dtype.name, **policy)
        key = self._keys[wanted] if wanted in self._keys else self.register(wanted)[0]
        turn = self._turns[name] = self._turns.get(name, 0) + 1
        return Push(self.session, key, turn, values)

    def total(self, name: str, values: Array) -> Array:
        """The sum over all ranks."""
        return self.push(name, values).wait()

    def close(self) -> None:
        self.session.close()


def mine(rank: int, turn: int) -> Array:
    """What a rank pushes: other numbers on every rank and in every turn."""
    return np.array([10 * place + 4**rank + 100 * turn for place in range(4)], np.float32)


def expected(size: int, turn: int) -> Array:
    """The sum of ``mine`` over all ranks; exact in float32."""
    return np.array(sum(mine(rank, turn) for rank in range(size)))


def outcomes(*works: Callable[[], Any], limit: float = 30.0) -> list[Any]:
    """Run all at the same time, as the ranks of a job do; what each returned, or its error."""
    pool = ThreadPoolExecutor(max(len(works), 1))
    try:
        futures = [pool.submit(work) for work in works]
        return [future.exception(limit) or future.result() for future in futures]
    finally:
        pool.shutdown(wait=False)


@contextmanager
def members(settings: Sequence[config.Settings]) -> Iterator[list[Plain]]:
    """A job whose workers live in this process; all leave at the end."""
    found = outcomes(*(partial(Plain, one) for one in settings))
    try:
        for plain in found:
            if isinstance(plain, BaseException):
                raise plain
        yield found
    finally:
        outcomes(*(plain.close for plain in found if isinstance(plain, Plain)))


def act(plain: Plain, word: str, turn: int) -> None:
    """Do one word of the command line."""
    rank, size = plain.session.rank, plain.session.size
    name, _, rest = word.partition(":")
    if name == "only":
        only, _, inner = rest.partition(":")
        if rank == int(only):
            act(plain, inner, turn)
    elif name == "sum":
        got = plain.push(rest, mine(rank, turn)).wait(None)
        if not np.array_equal(got, expected(size, turn)):
            raise ValueError(f"sum of {rest} is {got}, not {expected(size, turn)}")
        print("sum", rest, got.tolist(), flush=True)
    elif name == "forever":
        for number in itertools.count(turn):
            act(plain, f"sum:{rest}", number)
    elif name == "raise":
        raise ValueError(rest)
    elif name == "wait":
        time.sleep(float(rest))
    elif name == "touch":
        Path(rest).touch()
    elif name == "await":
        deadline = time.monotonic() + 30.0
        while not Path(rest).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(rest)
            time.sleep(0.01)
    elif name == "leave":
        plain.close()
    else:
        raise ValueError(word)


def main() -> None:
    settings = config.load({}, os.environ)
    log.setup(settings.log_level, settings.log_format, f"[w{settings.rank}]")
    plain = Plain(settings)
    turns: dict[str, int] = {}
    try:
        for word in sys.argv[1:]:
            turns[word] = turns.get(word, 0) + 1
            act(plain, word, turns[word])
    except Exception as error:
        plain.session.abort(f"{type(error).__name__}: {error}")
        raise
    plain.close()


if __name__ == "__main__":
    main()
