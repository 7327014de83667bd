"""N ranks in one process: sessions that sum by the simplest possible code, in rank order.

Ranks run as threads. A round's sum is made by the thread that brings the last contribution, cut in
small pieces, and handed to the sinks at once, or as late as possible: in the waiter (``late``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from gradsum.config import Settings, load
from gradsum.errors import MismatchError, PeerLost, StallTimeout
from gradsum.proto.dtypes import HALVES, size_of
from gradsum.scheduler.policy import BROADCAST
from gradsum.scheduler.table import Table, TensorSpec, parse_spec
from gradsum.worker.client import Client
from gradsum.worker.rounds import Outcome, Sink

LIMIT = 20.0
PIECE = 64
T = TypeVar("T")


class NaiveHandle:
    def __init__(self, cluster: NaiveCluster, name: str) -> None:
        self.name = name
        self.cluster = cluster
        self.outcome: Outcome | None = None
        self.pending: Callable[[], None] | None = None
        self.calls: list[Callable[[], None]] = []

    def tell(self, call: Callable[[], None]) -> None:
        with self.cluster.changed:
            if self.outcome is None:
                self.calls.append(call)
                return
        self.wait()
        call()

    def done(self) -> bool:
        return self.outcome is not None and self.pending is None

    def wait(self, timeout: float | None = None) -> Outcome:
        limit = LIMIT if timeout is None else timeout
        self.cluster.await_(lambda: self.outcome is not None, f"sum of {self.name!r}", limit)
        with self.cluster.changed:
            late, self.pending = self.pending, None
            if late is not None:
                late()
        assert self.outcome is not None
        return self.outcome


class _Part:
    def __init__(self, source: memoryview | None, sink: Sink | None, handle: NaiveHandle) -> None:
        self.source, self.sink, self.handle = source, sink, handle


class NaiveCluster:
    def __init__(self, size: int, *, late: bool = False, **settings: Any) -> None:
        self.size = size
        self.late = late
        self.settings: Settings = load(settings, {})
        self.changed = threading.Condition(threading.RLock())
        self.table = Table()
        self.failure: BaseException | None = None
        self.rounds: dict[tuple[int, int], dict[int, _Part]] = {}
        self.complete: set[tuple[int, int]] = set()
        self.pushes: dict[str, int] = {}
        self.handed: list[tuple[int, str, int, int]] = []  # (rank, name, version, priority)
        self.meetings: dict[Any, dict[int, Any]] = {}
        self.reports: dict[str, dict[int, dict[int, int]]] = {}
        self.joined: list[int] = []
        self.last_version: dict[int, int] = {}

    def run(self, work: Callable[[Client], T]) -> list[T]:
        """``work(client)`` on every rank; the results, or the first error."""
        results: dict[int, T] = {}

        def rank_main(client: Client) -> None:
            try:
                results[client.session.rank] = work(client)
            except BaseException as error:
                with self.changed:
                    self.failure = self.failure or error
                    self.changed.notify_all()

        threads = [
            threading.Thread(target=rank_main, args=(Client(NaiveSession(self, rank)),))
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + LIMIT + 5
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a rank hangs"
        if self.failure is not None:
            raise self.failure
        return [results[rank] for rank in range(self.size)]

    def await_(self, ready: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: ready() or self.failure is not None, limit):
                raise StallTimeout(f"{what}: nothing for {limit} s")
            if not ready():
                raise PeerLost(f"another rank failed: {self.failure!r}")

    def meet(self, tag: Any, rank: int, value: Any) -> dict[int, Any]:
        """Every rank's value."""
        with self.changed:
            found = self.meetings.setdefault(tag, {})
            found[rank] = value
            self.changed.notify_all()
        self.await_(lambda: len(found) == self.size, f"meeting {tag}")
        return found

    def settle(self, key: int, version: int) -> None:
        """Sum the round if all have contributed (the caller holds the lock)."""
        spec = self.table[key]
        parts = self.rounds[key, version]
        gone = {r: _Part(None, None, NaiveHandle(self, spec.name)) for r in self.joined}
        everybody = parts if spec.policy.kind == BROADCAST else gone | parts
        if len(everybody) < self.size or (key, version) in self.complete:
            return
        self.complete.add((key, version))
        given = [bytes(p.source) for _, p in sorted(everybody.items()) if p.source is not None]
        total, exponent = _sum(spec, given, self.size)
        for part in parts.values():
            self._deliver(part, total, exponent, bool(given))
        self.changed.notify_all()

    def _deliver(self, part: _Part, total: bytes, exponent: int, present: bool) -> None:
        def write() -> None:
            if part.sink is not None and present:
                for start in range(0, max(len(total), 1), PIECE):
                    piece = memoryview(total)[start : start + PIECE]
                    part.sink.write(start, piece, self.size, exponent)

        part.handle.outcome = Outcome(present, self.size)
        if self.late:
            part.handle.pending = write
        else:
            write()
        for call in part.handle.calls:
            part.handle.wait()
            call()


class NaiveSession:
    def __init__(self, cluster: NaiveCluster, rank: int) -> None:
        self.cluster = cluster
        self.rank = rank
        self.size = cluster.size
        self.local_rank, self.local_size = rank, cluster.size
        self.settings = cluster.settings
        self.closed = False
        self.handles: list[NaiveHandle] = []
        self.steps = 0
        self.pack_bytes = cluster.settings.pack_bytes
        self.sharing = False
        self.taken: list[memoryview] = []
        self._versions: dict[int, int] = {}
        self._turns: dict[str, int] = {}
        self._groups = 0

    def buffer(self, nbytes: int) -> memoryview:
        self.taken.append(memoryview(bytearray(nbytes)))
        return self.taken[-1]

    def transports(self) -> dict[int, str]:
        return {}

    def register(self, specs: Sequence[TensorSpec], group: str = "") -> list[int]:
        cluster = self.cluster
        for spec in specs:
            parse_spec(spec)
        if group:
            seen = cluster.meet(("set", group), self.rank, sorted(s.name for s in specs))
            if any(names != seen[0] for names in seen.values()):
                raise MismatchError(f"sets differ: {seen}")
        keys = []
        with cluster.changed:
            for spec in specs:
                key = cluster.table.key(spec.name)
                if key is None:
                    key = cluster.table.append(spec)
                if cluster.table[key] != spec:
                    sides = f"{cluster.table[key].describe()} and {spec.describe()}"
                    raise MismatchError(f"{spec.name!r}: {sides}", tensor=spec.name)
                self._versions.setdefault(key, spec.first - 1)
                keys.append(key)
        return keys

    def submit(
        self,
        key: int,
        version: int,
        source: memoryview | None,
        sink: Sink | None,
        priority: int = 0,
    ) -> NaiveHandle:
        cluster, spec = self.cluster, self.cluster.table[key]
        assert version == self._versions[key] + 1, f"{spec.name}: {version} is out of order"
        self._versions[key] = version
        handle = NaiveHandle(cluster, spec.name)
        self.handles.append(handle)
        with cluster.changed:
            if source is not None:
                assert source.format == "B" and source.nbytes == spec.nbytes, spec.name
                cluster.pushes[spec.name] = cluster.pushes.get(spec.name, 0) + 1
            cluster.handed.append((self.rank, spec.name, version, priority))
            parts = cluster.rounds.setdefault((key, version), {})
            parts[self.rank] = _Part(source, sink, handle)
            cluster.settle(key, version)
        return handle

    def gather(self, tag: str, value: Any) -> dict[int, Any]:
        turn = self._turns[tag] = self._turns.get(tag, 0) + 1
        return self.cluster.meet((tag, turn), self.rank, value)

    def barrier(self) -> None:
        self.gather("barrier", None)

    def report_window(self, group: str, counts: dict[int, int], order: list[int]) -> None:
        self.cluster.reports.setdefault(group, {})[self.rank] = dict(counts)

    def firings(self, group: str) -> dict[int, int] | None:
        reports = self.cluster.reports.get(group, {})
        if len(reports) < self.size:
            return None
        keys = {key for counts in reports.values() for key in counts}
        return {key: max(c.get(key, 0) for c in reports.values()) for key in keys}

    def mark_step(self) -> None:
        self.steps += 1

    def join(self) -> int:
        cluster = self.cluster
        with cluster.changed:
            cluster.joined.append(self.rank)
            for key, version in list(cluster.rounds):
                cluster.settle(key, version)
            cluster.changed.notify_all()
        cluster.await_(lambda: len(cluster.joined) == cluster.size, "join")
        return cluster.joined[-1]

    def next_group(self, kind: str = "opt") -> str:
        self._groups += 1
        return f"{kind}{self._groups - 1}"

    def speed(self) -> tuple[int, float]:
        return 0, 0.0

    def abort(self, message: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True

    def check(self) -> None:
        if self.closed:
            raise AssertionError("closed")


def _sum(spec: TensorSpec, given: list[bytes], size: int) -> tuple[bytes, int]:
    """The sum in rank order and its exponent; half types are scaled lest they overflow."""
    if not given:
        return b"", 0
    if spec.policy.kind == BROADCAST or len(given) == 1 and spec.wire not in HALVES:
        return given[0], 0
    if spec.wire not in HALVES:
        rows = [np.frombuffer(row, dtype=spec.wire) for row in given]
        total = rows[0].copy()
        for row in rows[1:]:
            total = total + row
        return total.tobytes(), 0
    dtype = getattr(torch, spec.wire)
    wide = torch.zeros(len(given[0]) // size_of(spec.wire))
    for data in given:
        if data:
            wide += torch.frombuffer(bytearray(data), dtype=dtype).float()
    exponent = (size - 1).bit_length()
    half = (wide / 2**exponent).to(dtype)
    return half.view(torch.uint8).numpy().tobytes(), exponent


def settled(client: Client) -> bool:
    """Whether no round of this rank is open."""
    session = client.session
    assert isinstance(session, NaiveSession)
    return all(handle.done() for handle in session.handles)
