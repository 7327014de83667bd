"""A session of one rank without any process, socket or thread: ``init()`` on a laptop (C101).

It checks what a real session checks, names, shapes and versions, so that a script which runs alone
runs in a job too. A round is over when ``submit`` returns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from gradsum.config import Settings
from gradsum.errors import MismatchError, ProtocolError, UsageError
from gradsum.proto.codec import pack
from gradsum.proto.limits import MAX_GATHER
from gradsum.scheduler.policy import BROADCAST
from gradsum.scheduler.table import Table, TensorSpec, parse_spec
from gradsum.worker.face import Handle
from gradsum.worker.rounds import Outcome, Sink


class _Done:
    """A round that is over."""

    def __init__(self, name: str, outcome: Outcome) -> None:
        self.name = name
        self._outcome = outcome

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self, timeout: float | None = None) -> Outcome:
        """What came of it."""
        return self._outcome

    def tell(self, call: Callable[[], None]) -> None:
        """At once."""
        call()


class LocalSession:
    """Rank 0 of 1."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.closed = False
        self._table = Table()
        self._versions: dict[int, int] = {}
        self._firings: dict[str, dict[int, int]] = {}
        self._groups = 0
        self._bytes = 0
        self._since = time.monotonic()
        self._process = os.getpid()

    pack_bytes = 0
    sharing = False

    def buffer(self, nbytes: int) -> memoryview:
        """Plain memory."""
        return memoryview(bytearray(nbytes))

    def transports(self) -> dict[int, str]:
        """There is no server."""
        return {}

    def register(self, specs: Sequence[TensorSpec], group: str = "") -> list[int]:
        """Keys of the names; MismatchError for a name with another spec."""
        self.check()
        keys = []
        for spec in specs:
            key = self._table.key(parse_spec(spec).name)
            if key is None:
                key = self._table.append(spec)
                self._versions[key] = spec.first - 1
            elif self._table[key] != spec:
                old = self._table[key].describe()
                raise MismatchError(
                    f"name {spec.name!r} is {old}, not {spec.describe()}", tensor=spec.name
                )
            keys.append(key)
        return keys

    def submit(
        self,
        key: int,
        version: int,
        source: memoryview | None,
        sink: Sink | None,
        priority: int = 0,
    ) -> Handle:
        """The sum of one rank is what it gives."""
        self.check()
        spec = self._table[key]
        if version != self._versions[key] + 1:
            raise ProtocolError(
                f"version {version} of {spec.name!r} after {self._versions[key]}", tensor=spec.name
            )
        self._versions[key] = version
        if source is not None:
            self._bytes += len(source)
            if sink is not None and spec.policy.kind != BROADCAST:
                sink.write(0, source, 1, 0)
        return _Done(spec.name, Outcome(source is not None, 1))

    def gather(self, tag: str, value: Any) -> dict[int, Any]:
        """This rank's value."""
        self.check()
        if len(pack(value)) > MAX_GATHER:
            raise UsageError(f"gather of {tag!r}: more than {MAX_GATHER} bytes")
        return {0: value}

    def barrier(self) -> None:
        """Nobody to wait for."""
        self.check()

    def report_window(self, group: str, counts: dict[int, int], order: list[int]) -> None:
        """Kept for ``firings``."""
        self._firings[group] = dict(counts)

    def firings(self, group: str) -> dict[int, int] | None:
        """What was reported."""
        return self._firings.get(group)

    def mark_step(self) -> None:
        """No fence is ever up."""
        self.check()

    def join(self) -> int:
        """This rank is the last."""
        self.check()
        return 0

    def next_group(self, kind: str = "opt") -> str:
        """ "opt0", "opt1", ..."""
        self._groups += 1
        return f"{kind}{self._groups - 1}"

    def speed(self) -> tuple[int, float]:
        """(time in ms, MB/s since the last call)."""
        now = time.monotonic()
        rate = self._bytes / 1e6 / max(now - self._since, 1e-9)
        self._bytes, self._since = 0, now
        return time.time_ns() // 1_000_000, rate

    def abort(self, message: str) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Calls raise from now on."""
        self.closed = True

    def check(self) -> None:
        """UsageError when closed or in a forked child."""
        if self.closed:
            raise UsageError("the session is closed", hint="call gradsum.init() again")
        if os.getpid() != self._process:
            raise UsageError(
                "this process was forked after gradsum.init()",
                hint="call init() in the child, or start it by spawn",
            )
