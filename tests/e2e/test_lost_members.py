"""Members that die, stall or leave: the others hear within seconds who it was."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradsum.errors import GradsumError, PeerLost, StallTimeout, Unreachable
from tests.e2e.daemons import QUICK, START, Daemons, running, until
from tests.e2e.plain_worker import Plain, expected, members, mine, outcomes

pytestmark = pytest.mark.slow

LEASE = float(QUICK["GRADSUM_LEASE"])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """One service for all tests of this file; each finds it ready for the next job."""
    with running(tmp_path_factory.mktemp("service"), workers=2, servers=2, env=QUICK) as daemons:
        yield daemons


def error(found: Any, kind: type[GradsumError], *words: str) -> None:
    assert type(found) is kind, repr(found)
    for word in words:
        assert word in str(found)
    assert found.hint


def require_next_job(service: Daemons, limit: float = 5.0) -> None:
    """Two new workers get right sums of a name that was used before with another shape."""
    start = time.monotonic()
    with members([service.settings(rank, 2) for rank in (0, 1)]) as job:
        work = [partial(p.total, "w", np.full((2, 3), 1.0 + r, "f4")) for r, p in enumerate(job)]
        for got in outcomes(*work):
            assert np.array_equal(got, np.full((2, 3), 3.0))
    assert time.monotonic() - start < limit


def join_beside(service: Daemons, *acts: str, **settings: Any) -> tuple[Plain, Any]:
    """Rank 0 in this process, rank 1 in another one; both have done a round of ``w``."""
    ready = service.folder / f"ready-{time.monotonic_ns()}"
    other = service.worker(1, 2, "sum:w", f"touch:{ready}", *acts)
    (plain,) = outcomes(lambda: Plain(service.settings(0, 2, **settings)))
    assert isinstance(plain, Plain), plain
    assert np.array_equal(plain.total("w", mine(0, 1)), expected(2, 1))
    until(ready.exists, 5.0, "rank 1 has its sum")
    return plain, other


def clock(line: str) -> float:
    """Seconds of the day at which a line was logged."""
    hours, minutes, seconds = line.split()[1].split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def test_c16_the_job_after_a_killed_one_starts_fresh_at_once(service: Daemons) -> None:
    ready = service.folder / "third round"
    acts = ("sum:w", "sum:w", "sum:w", f"only:0:touch:{ready}", "forever:w")
    killed = [service.worker(rank, 2, *acts) for rank in (0, 1)]
    until(ready.exists, START, "three rounds")
    for process in killed:
        os.kill(process.pid, signal.SIGKILL)
    require_next_job(service)


def test_c04_a_killed_worker_is_named_to_the_others(service: Daemons) -> None:
    plain, other = join_beside(service, "forever:silence")
    push = plain.push("w", mine(0, 2))
    os.kill(other.pid, signal.SIGKILL)
    start = time.monotonic()
    for found in outcomes(push.wait, plain.session.barrier):
        error(found, PeerLost, "worker rank 1", f"pid {other.pid}", "its connection closed")
    assert time.monotonic() - start < 2.0
    plain.close()
    require_next_job(service)


def test_c19_a_worker_that_raises_is_named_with_its_error(service: Daemons) -> None:
    plain, other = join_beside(service, "raise:boom")
    start = time.monotonic()
    (found,) = outcomes(partial(plain.total, "w", mine(0, 2)))
    error(found, PeerLost, "worker rank 1", f"pid {other.pid}", "ValueError: boom")
    assert time.monotonic() - start < 2.0
    plain.close()
    assert other.wait(5.0) == 1
    assert other.err.count("Traceback") == 1
    assert "ValueError: boom" in other.err
    require_next_job(service)


def test_c04_a_silent_worker_is_named_after_the_lease(service: Daemons) -> None:
    plain, other = join_beside(service, "forever:silence")
    os.kill(other.pid, signal.SIGSTOP)
    start = time.monotonic()
    try:
        (found,) = outcomes(plain.push("w", mine(0, 2)).wait)
    finally:
        os.kill(other.pid, signal.SIGKILL)
    error(found, PeerLost, "worker rank 1", "not heard of for")
    assert LEASE - 1.0 < time.monotonic() - start < LEASE + 5.0
    plain.close()
    require_next_job(service)


def test_c28_a_rank_that_leaves_early_is_named(service: Daemons) -> None:
    with members([service.settings(rank, 2) for rank in (0, 1)]) as (stays, goes):
        both = [partial(p.total, "w", mine(r, 1)) for r, p in enumerate((stays, goes))]
        assert all(np.array_equal(got, expected(2, 1)) for got in outcomes(*both))
        push = stays.push("w", mine(0, 2))
        goes.close()
        start = time.monotonic()
        new = partial(stays.total, "new", mine(0, 1))
        for found in outcomes(push.wait, stays.session.barrier, new):
            error(found, PeerLost, "rank 1 has left the job", "join()")
        assert time.monotonic() - start < 3.0


def test_c44_a_stall_says_what_and_who_is_missing_then_ends(service: Daemons) -> None:
    limits = {"GRADSUM_STALL_WARNING": "1", "GRADSUM_STALL_TIMEOUT": "4"}
    here = service.worker(0, 2, "sum:w", "sum:fc.weight", **limits)
    there = service.worker(1, 2, "sum:w", "sum:_orig_mod.fc.weight", **limits)
    for process, name, missing in ((here, "fc.weight", 1), (there, "_orig_mod.fc.weight", 0)):
        process.says(f"tensor {name!r} version 1: not complete after 1 s", START)
        assert process.wait(8.0) == 1
        assert f"waiting for rank {missing}" in process.err
        lines = [line for line in process.err.splitlines() if "not complete after" in line]
        times = [clock(line) for line in lines if "WARNING" in line]
        assert all(0.95 < b - a for a, b in pairwise(times)), "once an interval"
        own = f"StallTimeout: tensor {name!r} version 1 is not complete after 4 s: waiting for"
        heard = f"PeerLost: worker rank {missing} ("  # whose own limit passed a moment earlier
        assert f"{own} rank {missing}" in process.err or (
            heard in process.err and "is not complete after 4 s" in process.err
        )
    assert "StallTimeout: tensor" in here.err + there.err


def test_c44_a_barrier_that_stalls_says_who_is_missing(service: Daemons) -> None:
    settings = [service.settings(rank, 2, stall_warning=1, stall_timeout=3) for rank in (0, 1)]
    with members(settings) as (here, _):
        (found,) = outcomes(here.session.barrier)
        error(found, StallTimeout, "'barrier'", "3 s", "waits for rank 1")
    assert service.coordinator is not None
    assert "gather 'barrier' waits for rank 1" in service.coordinator.err


def test_c20_a_killed_server_is_named_with_its_address(service: Daemons) -> None:
    big = np.ones(8 << 20, np.float32)  # on both servers
    with members([service.settings(rank, 2) for rank in (0, 1)]) as job:
        for got in outcomes(*(partial(plain.total, "big", big) for plain in job)):
            assert np.array_equal(got, 2 * big)
        victim = service.servers.pop()
        address = victim.out.rpartition(" ")[2].strip()
        os.kill(victim.pid, signal.SIGKILL)
        start = time.monotonic()
        for found in outcomes(*(partial(plain.total, "big", big) for plain in job)):
            error(found, PeerLost, "server 1 (", f"pid {victim.pid}", f"tcp://{address}")
        assert time.monotonic() - start < LEASE + 5.0
    service.add_server()
    require_next_job(service)


def test_c20_c89_a_killed_coordinator_is_named_and_servers_end_when_told(tmp_path: Path) -> None:
    with running(tmp_path, workers=2, servers=2, env=QUICK) as daemons:
        with members([daemons.settings(rank, 2) for rank in (0, 1)]) as job:
            both = [partial(p.total, "w", mine(r, 1)) for r, p in enumerate(job)]
            assert all(np.array_equal(got, expected(2, 1)) for got in outcomes(*both))
            assert daemons.coordinator is not None
            os.kill(daemons.coordinator.pid, signal.SIGKILL)
            start = time.monotonic()
            push = job[0].push("w", mine(0, 2))
            for found in outcomes(push.wait, job[0].session.barrier, job[1].session.barrier):
                error(found, Unreachable, f"coordinator at {daemons.address}", "silent for")
            assert time.monotonic() - start < LEASE + 5.0
            start = time.monotonic()
        assert time.monotonic() - start < 2.0, "there is nobody to say goodbye to"
        for server in daemons.servers:
            server.says(f"the coordinator at {daemons.address} has been silent", LEASE + 5.0)
        start = time.monotonic()
        for server in daemons.servers:
            server.popen.terminate()
        assert [server.wait(5.0) for server in daemons.servers] == [0, 0]
        assert time.monotonic() - start < 5.0


def test_c89_daemons_end_with_0_when_told_between_jobs(service: Daemons) -> None:
    """The last test of this file: the service has seen a dozen jobs, most of which failed."""
    require_next_job(service)
    start = time.monotonic()
    for process in service.all:
        assert process.running
        process.popen.terminate()
    assert [process.wait(5.0) for process in service.all] == [0, 0, 0]
    assert time.monotonic() - start < 5.0
    for process in service.all:
        assert "Traceback" not in process.err
