"""What a scenario gets: its rank, a membership of a job of its own, and ways to compare ranks.

A scenario is a function that every rank runs in one process of a crew (``play.py``). Rules: ranks
use different data; expected values are computed here, by one process that sees all ranks' data; the
returned value must be the same on all ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

import gradsum
from gradsum.deploy.status import ask
from gradsum.worker.default import default

T = TypeVar("T")
Act = Callable[["Stage"], Any]


class Scenario(NamedTuple):
    """One function with the number of ranks and the service that it runs on."""

    name: str
    act: Act
    ranks: int
    service: str
    limit: float  # seconds
    long: bool


def scenario(
    *,
    ranks: Sequence[int] = (2,),
    services: Sequence[str] = ("plain",),
    limit: float = 20.0,
    long: bool = False,
) -> Callable[[Act], Act]:
    """Mark a function as a scenario for each of these numbers of ranks and services.

    limit: seconds until gradsum's own waits end. long: only with ``-m long``. May be used twice.
    """

    def mark(act: Act) -> Act:
        name = act.__name__
        act.scenarios = getattr(act, "scenarios", []) + [  # type: ignore[attr-defined]
            Scenario(f"{name}[{count}-{service}]", act, count, service, limit, long)
            for count in ranks
            for service in services
        ]
        return act

    return mark


class Place(NamedTuple):
    """A running service: where its coordinator is, and its processes."""

    coordinator: str | None  # None: local mode
    servers: tuple[int, ...]  # process ids
    settings: dict[str, Any]  # for the workers
    joined: bool = False  # all scenarios share the job that this process is in


class Meeting:
    """Ranks wait for each other through files, for what gradsum itself cannot do between jobs."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self._rank = rank

    def wait(self, tag: str, ranks: int, limit: float) -> None:
        """Until all ranks below ``ranks`` are here."""
        (self.folder / f"{tag}.{self._rank}").touch()
        deadline = time.monotonic() + limit
        for rank in range(ranks):
            while not (self.folder / f"{tag}.{rank}").exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} is not at {tag!r} after {limit} s")
                time.sleep(0.002)


class Stage:
    """One rank's side of one scenario."""

    def __init__(
        self, what: Scenario, rank: int, place: Place, meeting: Meeting, turn: int
    ) -> None:
        self.rank = rank
        self.size = what.ranks
        self.place = place
        self.limit = what.limit
        self.folder = meeting.folder
        self.notices: list[str] = []
        self.name = what.name
        self._meeting = meeting
        self._turn = turn
        self._jobs = 0

    # -- membership ---------------------------------------------------------------------------

    def enter(self, **settings: Any) -> None:
        """Join a job of this scenario."""
        if self.place.joined:
            return
        self._jobs += 1
        given: dict[str, Any] = {
            "coordinator": self.place.coordinator,
            "rank": self.rank,
            "world_size": self.size,
            "job": f"{self.name} {self._jobs}",
            "stall_timeout": self.limit,
            "start_timeout": self.limit,
        }
        gradsum.init(**(given | self.place.settings | settings))

    def again(self, **settings: Any) -> None:
        """Leave, wait until all ranks have left, and join another job."""
        gradsum.shutdown()
        self.meet()
        self.enter(**settings)

    def meet(self) -> None:
        """Wait for all ranks without any help of gradsum."""
        self._turn += 1
        self._meeting.wait(f"{self._turn} {self.name}", self.size, self.limit)

    @property
    def session(self) -> Any:
        """This rank's session."""
        return default.get().session

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Keep what gradsum logs in ``notices``."""
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.notices.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("gradsum")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    # -- ranks --------------------------------------------------------------------------------

    def mine(self, *values: T) -> T:
        """This rank's of the values."""
        return values[self.rank]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        found = self.session.gather("scenario", value)
        return [found[rank] for rank in range(self.size)]

    def same(self, *tensors: torch.Tensor) -> None:
        """Fail unless all ranks hold the same bits."""
        hashes = self.gather([digest(tensor) for tensor in tensors])
        assert all(each == hashes[0] for each in hashes), f"ranks differ: {hashes}"

    # -- what can be seen from outside --------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """What this rank has sent and received so far."""
        found: dict[str, int] = self.session.info()
        return found

    def pushes(self) -> int:
        """Pushes and ABSENTs so far, without repeats."""
        counters = self.counters()
        return counters["pushes"] - counters["resends"]

    def open_rounds(self) -> int:
        """Operations of this rank that are not complete."""
        return len(self.session._comm.core.waiting())

    def epoch(self) -> int:
        """Of the plan that this rank follows."""
        return int(self.session._comm.core.plan.epoch)

    def placement(self) -> list[tuple[str, list[int]]]:
        """The server of every slice, by the name of the unit's first tensor."""
        core = self.session._comm.core
        units = core._layout.units
        return [
            (core.table[unit.key].name, [s.server for s in unit.slices]) for unit in units.values()
        ]

    def status(self) -> dict[str, Any]:
        """The coordinator's picture of itself."""
        return ask(self.place.coordinator or "", 5.0)

    @contextlib.contextmanager
    def stopped_servers(self, seconds: float) -> Iterator[None]:
        """Rank 0 stops the servers now; they go on after ``seconds``, whatever happens."""
        if self.rank != 0:
            yield
            return
        self._signal(signal.SIGSTOP)
        timer = threading.Timer(seconds, self._signal, [signal.SIGCONT])
        timer.start()
        try:
            yield
        finally:
            timer.join()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.place.servers:
            os.kill(pid, number)


def digest(tensor: torch.Tensor) -> str:
    """A hash of dtype, shape and bits in logical order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).flatten()
    data = flat.view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest() + f"{tensor.dtype}{list(tensor.shape)}"


def equal(actual: Any, expected: Any, what: str = "") -> None:
    """Fail with both values unless they are equal; tensors: bits, dtype and shape."""
    if isinstance(expected, torch.Tensor):
        same = actual.dtype == expected.dtype and torch.equal(actual, expected)
    else:
        same = actual == expected
    if not same:
        raise AssertionError(f"{what or 'value'}: got {actual}, expected {expected}")


def close(actual: Any, expected: Any, atol: float = 1e-6, what: str = "") -> None:
    """Fail with both values unless they are near each other."""
    torch.testing.assert_close(
        torch.as_tensor(actual), torch.as_tensor(expected), atol=atol, rtol=0.0, check_dtype=False,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


def until(condition: Callable[[], object], what: str, limit: float = 5.0) -> None:
    """Wait until it holds, or fail."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit} s"
        time.sleep(0.002)


@contextlib.contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Fail if the block takes longer."""
    start = time.monotonic()
    yield
    taken = time.monotonic() - start
    assert taken < seconds, f"{what} took {taken:.2f} s, limit {seconds} s"
