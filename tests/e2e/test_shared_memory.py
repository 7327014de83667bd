"""Workers and servers of one host: payloads in shared memory, TCP where that cannot be, never both
wrong. Lies about memory are refused, counted, and harm nobody."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from gradsum.errors import ConfigError, PeerLost, ProtocolError
from gradsum.proto import control
from gradsum.proto.address import parse_address
from gradsum.proto.local import Place, decode_place, encode_place
from gradsum.proto.transport.client import request
from gradsum.proto.transport.shared import SharedMemory
from tests.e2e.daemons import Daemons, running, until
from tests.e2e.plain_worker import Array, Plain, members, outcomes

pytestmark = pytest.mark.slow

SLICE = 64 << 10
ELEMENTS = 5 * SLICE // 4 + 1234


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    with running(
        tmp_path_factory.mktemp("service"), 2, 2, env={"GRADSUM_SLICE_BYTES": str(SLICE)}
    ) as daemons:
        yield daemons


def numbers(rank: int, turn: int) -> Array:
    """Other values on each rank, in each turn, at each place; sums are exact in float32."""
    return (np.arange(ELEMENTS) % 4001 + 5000 * (rank + 1) * turn).astype(np.float32)


def sums_are_right(job: list[Plain], turns: range) -> None:
    for turn in turns:
        got = outcomes(*(
            partial(plain.total, "w", numbers(rank, turn)) for rank, plain in enumerate(job)
        ))  # fmt: skip
        for one in got:
            assert not isinstance(one, BaseException), one
            assert np.array_equal(one, numbers(0, turn) + numbers(1, turn))


def transports(plain: Plain) -> set[str]:
    until(lambda: len(plain.session.transports()) == 2, 10.0, "two connections")
    return set(plain.session.transports().values())


def refused_places(service: Daemons) -> int:
    reply = request(parse_address(service.address), control.StatusQuery(1), 10.0)
    return sum(int(s["info"].get("unmapped", 0)) for s in reply.status["servers"])


@pytest.mark.parametrize("ways", [("shm", "shm"), ("shm", "tcp"), ("tcp", "tcp")])
def test_sums_are_right_whoever_shares_memory(service: Daemons, ways: tuple[str, str]) -> None:
    settings = [
        service.settings(r, 2, transport="auto" if way == "shm" else way)
        for r, way in enumerate(ways)
    ]
    with members(settings) as job:
        sums_are_right(job, range(1, 40))
        assert [transports(plain) for plain in job] == [{way} for way in ways]
        shown = outcomes(lambda: service.gradsum(
            "status", "status", "--coordinator", service.address, "--json").wait(20.0))  # fmt: skip
        assert shown == [0]


def test_memory_that_is_taken_again_and_again_stays_bounded(service: Daemons) -> None:
    with members([service.settings(rank, 2) for rank in (0, 1)]) as job:
        sums_are_right(job, range(1, 10))
        arenas = [plain.session.memory._arena for plain in job]
        sizes = [arena.capacity for arena in arenas]
        memory = [server.rss for server in service.servers]
        sums_are_right(job, range(10, 110))
        assert [arena.capacity for arena in arenas] == sizes
        for server, before in zip(service.servers, memory, strict=True):
            assert server.rss - before < 4e6


def unsealed(place: Place) -> Place:
    fd = os.memfd_create("naked", os.MFD_ALLOW_SEALING)  # stays open until the process ends
    os.ftruncate(fd, 1 << 20)
    known = os.fstat(fd)
    return Place(place.pid, fd, known.st_dev, known.st_ino, 0)


LIES: dict[str, Callable[[Place], Place]] = {
    "no seals": unsealed,
    "another file": lambda place: place._replace(inode=place.inode + 1),
    "no such descriptor": lambda place: place._replace(fd=100_000),
    "beyond the end": lambda place: place._replace(offset=1 << 40),
    "another process": lambda place: place._replace(pid=os.getppid()),
}


def lying(change: Callable[[Place], Place]) -> Callable[[bytes], bytes]:
    return lambda raw: encode_place(change(decode_place(raw)))


@pytest.mark.parametrize("lie", LIES)
def test_a_place_that_cannot_be_read_is_refused_counted_and_sent_by_tcp(
    service: Daemons, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    before = refused_places(service)
    with members([service.settings(rank, 2) for rank in (0, 1)]) as job:
        sums_are_right(job, range(1, 3))
        assert [transports(plain) for plain in job] == [{"shm"}] * 2
        honest, liar, change = SharedMemory.copy, job[1].session.memory, lying(LIES[lie])

        def copy(memory: SharedMemory, payload: Any) -> Any:
            copied = honest(memory, payload)
            if memory is not liar or copied is None:
                return copied
            return copied[0], change(copied[1])

        monkeypatch.setattr(SharedMemory, "copy", copy)
        sums_are_right(job, range(3, 8))
        assert [transports(plain) for plain in job] == [{"shm"}, {"tcp"}]
        until(lambda: refused_places(service) > before, 10.0, "the count is in the status")
        assert service.alive


@pytest.mark.parametrize("lie", ["no seals", "another file", "no such descriptor"])
def test_a_probe_that_cannot_be_read_means_tcp(
    service: Daemons, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    honest, change = SharedMemory.offer, lying(LIES[lie])

    def offer(memory: SharedMemory) -> tuple[str, bytes]:
        home, probe = honest(memory)
        return home, change(probe)

    monkeypatch.setattr(SharedMemory, "offer", offer)
    with members([service.settings(rank, 2) for rank in (0, 1)]) as job:
        sums_are_right(job, range(1, 4))
        assert [transports(plain) for plain in job] == [{"tcp"}] * 2


def test_a_worker_from_elsewhere_that_claims_to_be_local_is_not(
    service: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the text of our home, but the process that it names is none of ours."""
    honest = SharedMemory.offer
    elsewhere = lying(lambda place: place._replace(pid=1 << 30))
    monkeypatch.setattr(
        SharedMemory, "offer", lambda memory: (honest(memory)[0], elsewhere(honest(memory)[1]))
    )
    with members([service.settings(rank, 2) for rank in (0, 1)]) as job:
        sums_are_right(job, range(1, 3))
        assert [transports(plain) for plain in job] == [{"tcp"}] * 2


def test_a_sum_that_cannot_be_read_comes_by_tcp(
    service: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    with members([service.settings(rank, 2) for rank in (0, 1)]) as job:
        sums_are_right(job, range(1, 3))
        honest, blind = SharedMemory.read, job[0].session.memory

        def read(memory: SharedMemory, *where: Any) -> memoryview:
            if memory is blind:
                raise ProtocolError("a segment that is gone")
            return honest(memory, *where)

        monkeypatch.setattr(SharedMemory, "read", read)
        sums_are_right(job, range(3, 6))
        assert [transports(plain) for plain in job] == [{"tcp"}, {"shm"}]


def test_only_shared_memory_was_asked_for_and_is_not_there(
    service: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    with members([service.settings(rank, 2, transport="shm") for rank in (0, 1)]) as job:
        sums_are_right(job, range(1, 3))
    monkeypatch.setattr(SharedMemory, "offer", lambda memory: ("", b""))
    works = [partial(Plain, service.settings(rank, 2, transport="shm")) for rank in (0, 1)]
    errors = []
    for found in outcomes(*works):
        if isinstance(found, Plain):
            found = outcomes(partial(found.total, "w", numbers(0, 1)))[0]
        errors.append(found)
        assert "shares no memory with this process" in str(found)
    own = [error for error in errors if isinstance(error, ConfigError)]
    assert own and "--transport auto" in str(own[0])
    assert all(isinstance(error, ConfigError | PeerLost) for error in errors)
