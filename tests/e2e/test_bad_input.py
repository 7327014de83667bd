"""What bad input gets: an error in seconds that names cause and remedy, and nobody else harmed."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradsum.errors import (
    GradsumError,
    MismatchError,
    NotBuilt,
    Refused,
    StallTimeout,
    Unreachable,
    UsageError,
)
from tests.e2e.daemons import START, Daemons, Process, running
from tests.e2e.plain_worker import Plain, expected, members, mine, outcomes, spec

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).with_name("plain_worker.py"))
USAGE = str(Path(__file__).with_name("wrong_usage.py"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """One service for all tests of this file: whatever they do, the next one finds it well."""
    with running(tmp_path_factory.mktemp("service"), workers=2, servers=2) as daemons:
        yield daemons
        assert daemons.alive
        for process in daemons.all:
            assert "Traceback" not in process.err


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[Daemons]:
    """No service; its address is a port that is bound, but where nobody answers."""
    daemons = Daemons(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        daemons.address = "{}:{}".format(*taken.getsockname())
        yield daemons
    daemons.close()


def pair(service: Daemons, **settings: Any) -> AbstractContextManager[list[Plain]]:
    return members([service.settings(rank, 2, **settings) for rank in (0, 1)])


def require_sums(job: list[Plain], name: str, turn: int = 1) -> None:
    """A round with right values on all ranks: the service is well."""
    size = len(job)
    work = [partial(plain.total, name, mine(rank, turn)) for rank, plain in enumerate(job)]
    for got in outcomes(*work):
        assert np.array_equal(got, expected(size, turn)), got


def error(found: Any, kind: type[GradsumError], *words: str) -> GradsumError:
    """The error that was expected, whose text holds all the words and a remedy."""
    assert type(found) is kind, repr(found)
    for word in words:
        assert word in str(found)
    assert found.hint
    return found


def ended(process: Process, code: int, limit: float, *words: str) -> None:
    assert process.wait(limit) == code, process.err
    for word in words:
        assert word in process.err


# -- who cannot be reached, and who is missing -------------------------------------------------


def test_a_worker_names_a_coordinator_that_does_not_answer(idle: Daemons) -> None:
    start = time.monotonic()
    (found,) = outcomes(lambda: Plain(idle.settings(0, 2, connect_timeout=1)))
    error(found, Unreachable, idle.address, "does not answer", "gradsum status --coordinator")
    assert 1.0 <= time.monotonic() - start < 2.5


def test_commands_name_a_coordinator_that_does_not_answer(idle: Daemons) -> None:
    quick, there = {"GRADSUM_CONNECT_TIMEOUT": "2"}, ("--coordinator", idle.address)
    server = idle.gradsum("server", "server", *there, **quick)
    status = idle.gradsum("status", "status", *there, "--timeout", "1")
    job = idle.gradsum("launch", "launch", *there, "--", "python", SCRIPT, **quick)
    nowhere = idle.gradsum("nowhere", "server", "--coordinator", "nowhere.invalid:77")
    limit = START + 3.0
    ended(server, 3, limit, idle.address, "does not answer", "hint: is it running there?")
    ended(status, 3, limit, idle.address, "no answer", "gradsum coordinator --bind")
    ended(job, 1, limit, f"the coordinator at {idle.address} does not answer", "gradsum launch:")
    ended(nowhere, 3, limit, "nowhere.invalid", "hint: ")


def test_those_who_wait_say_who_is_missing_and_give_up_in_the_end(tmp_path: Path) -> None:
    env = {"GRADSUM_START_TIMEOUT": "5"}
    missing = "waiting for 1 of 2 servers and for worker rank 1; here: worker rank 0 ("
    with running(tmp_path, workers=2, servers=1, expected_servers=2, env=env) as daemons:
        worker = daemons.worker(0, 2)
        worker.says(missing, START)
        for daemon in daemons.all:
            daemon.says(missing, 1.0)
        worker.says("WARNING worker: " + missing, 5.0)
        ended(worker, 1, 8.0, StallTimeout.__name__, "did not start within 5 s: " + missing)
        assert "hint: start what is missing" in worker.err
        assert daemons.alive, "what runs can still be used"
        daemons.add_server()
        with pair(daemons) as job:
            require_sums(job, "w")


def test_e9_a_server_that_workers_cannot_reach_is_named_with_its_address(tmp_path: Path) -> None:
    with running(tmp_path, workers=2, servers=0, expected_servers=1) as daemons:
        server = daemons.add_server("--advertise", "127.0.0.9")
        settings = [daemons.settings(rank, 2, connect_timeout=2) for rank in (0, 1)]
        start = time.monotonic()
        found = outcomes(*(partial(Plain, one) for one in settings))
        for rank, plain in enumerate(found):
            if isinstance(plain, Plain):
                (found[rank],) = outcomes(partial(plain.total, "w", mine(rank, 1)))
                plain.close()
        assert time.monotonic() - start < 6.0
        texts = [str(side) for side in found]
        assert any(type(side) is Unreachable for side in found), texts
        for text in texts:
            assert "server 0 at tcp://127.0.0.9:" in text and "cannot be reached" in text
        assert daemons.alive and server.running


@pytest.mark.parametrize(
    ("rank", "size", "words"),
    [
        (0, 3, ("world size of 3", "expects 2 workers", "--workers 3")),
        (7, None, ("rank 7 is outside a world of 2 workers", "ranks go from 0 to 1")),
    ],
)
def test_a_wrong_world_is_refused(
    service: Daemons, rank: int, size: int | None, words: tuple[str, ...]
) -> None:
    start = time.monotonic()
    (found,) = outcomes(lambda: Plain(service.settings(rank, size)))
    error(found, Refused, *words)
    assert time.monotonic() - start < 2.0


def test_two_processes_with_one_rank(service: Daemons) -> None:
    with pair(service) as job:
        start = time.monotonic()
        (found,) = outcomes(lambda: Plain(service.settings(1, 2)))
        error(found, Refused, "rank 1 is taken by pid ", "its own RANK")
        assert time.monotonic() - start < 5.0
        require_sums(job, "w")


def test_c16_a_second_job_is_refused_by_name_and_the_next_one_starts_fresh(
    service: Daemons,
) -> None:
    with pair(service, job="A") as job:
        require_sums(job, "w")
        (found,) = outcomes(lambda: Plain(service.settings(0, 2, job="B")))
        error(found, Refused, "busy with job 'A', 2 of 2 workers", "another coordinator")
        require_sums(job, "w", turn=2)
    start = time.monotonic()
    with pair(service, job="B") as job:
        ones = np.ones((2, 3), np.float32)
        for got in outcomes(*(partial(plain.total, "w", ones) for plain in job)):
            assert np.array_equal(got, np.full((2, 3), 2.0))
    assert time.monotonic() - start < 5.0


# -- ranks that disagree -----------------------------------------------------------------------

DISPUTES = [
    (spec("x", 2, 3), spec("x", 3, 2), "float32[2, 3]", "float32[3, 2]"),
    (spec("y", 6), spec("y", 6, dtype="float64"), "float32[6]", "float64[6]"),
    (spec("z", 6), spec("z", 7), "float32[6]", "float32[7]"),
    (spec("p", 6), spec("p", 6, kind="broadcast", root=1), "float32[6]", "broadcast from rank 1"),
    (spec("f", 6), spec("f", 6, first=3), "from version 1", "from version 3"),
]


@pytest.mark.parametrize("waits", [True, False], ids=["it waits", "it pushes later"])
@pytest.mark.parametrize("number", range(len(DISPUTES)), ids=[d[0].name for d in DISPUTES])
def test_c32_a_disputed_tensor_fails_on_all_ranks(
    service: Daemons, number: int, waits: bool
) -> None:
    one, two, left, right = DISPUTES[number]
    values = np.ones(one.shape, one.dtype)
    with pair(service) as (zero, other):
        zero.register(one)
        push = zero.push(one.name, values) if waits else None
        start = time.monotonic()
        found = outcomes(lambda: other.register(two))
        found += outcomes(lambda: (push or zero.push(one.name, values)).wait())
        for side in found:
            error(side, MismatchError, repr(one.name), "rank 0: ", "rank 1: ", left, right)
        assert time.monotonic() - start < 5.0
        require_sums([zero, other], "good")


def test_different_sets_of_parameters_end_the_job_by_name(service: Daemons) -> None:
    with pair(service) as (zero, other):
        zero.register(spec("both", 3), spec("bias", 3), group="opt0")
        push = zero.push("both", np.ones(3, np.float32))
        start = time.monotonic()

        def wrap() -> None:
            other.register(spec("both", 3), spec("_orig_mod.bias", 3), group="opt0")
            other.session.barrier()

        lacks = ("'opt0'", "rank 0 lacks '_orig_mod.bias'", "rank 1 lacks 'bias'")
        for side in outcomes(push.wait, zero.session.barrier, wrap):
            error(side, MismatchError, *lacks)
        found = outcomes(lambda: zero.total("new", mine(0, 1)), lambda: other.register(spec("n")))
        assert [type(side) for side in found] == [MismatchError] * 2, "the whole job has failed"
        assert time.monotonic() - start < 5.0
    with pair(service) as job:
        require_sums(job, "both")


def test_different_numbers_of_backward_passes_end_the_job_by_name(service: Daemons) -> None:
    with pair(service) as job:
        for number, plain in enumerate(job, 1):
            (key,) = plain.register(spec("weight", 3, pack="opt0"), group="opt0")
            plain.session.report_window("opt0", {key: number}, [key])
        start = time.monotonic()
        for side in outcomes(*(plain.session.barrier for plain in job)):
            error(side, MismatchError, "'weight'", "1 on rank 0, 2 on rank 1", "backward_passes")
        assert time.monotonic() - start < 5.0
    with pair(service) as job:
        require_sums(job, "weight")


@pytest.mark.parametrize(
    ("field", "value"), [("window", 2), ("slack", 1), ("op", "state"), ("route", "peer")]
)
def test_a_policy_of_a_later_release_is_named(service: Daemons, field: str, value: Any) -> None:
    with pair(service) as job:
        later = spec("x", 3, **{field: value})
        for found in outcomes(*(partial(plain.register, later) for plain in job)):
            error(found, NotBuilt, f"{field}={value!r}", "'x'", "not built yet")
        require_sums(job, "x")


# -- commands and calls ------------------------------------------------------------------------


def test_c85_c91_addresses_that_cannot_be_bound(idle: Daemons) -> None:
    sizes = ("--workers", "1", "--servers", "1")
    cases = [
        (("coordinator", "--bind", idle.address, *sizes), (idle.address, "already in use")),
        (("coordinator", "--bind", "0.0.0.0:0", *sizes), ("all interfaces", "--bind HOST")),
        (("coordinator", "--bind", "10.1.2.3:0", *sizes), ("10.1.2.3", "--insecure")),
        (("server", "--coordinator", idle.address, "--bind", "10.1.2.3"), ("10.1.2.3",)),
        (("server", "--coordinator", idle.address, "--bind", "*"), ("all interfaces",)),
    ]
    started = [(idle.gradsum(words[0], *words), texts) for words, texts in cases]
    for process, texts in started:
        ended(process, 2, START, *texts, "hint: ")


def test_a_script_that_does_not_exist(idle: Daemons) -> None:
    job = idle.gradsum("launch", "launch", "--standalone", "--", "python", "no_such.py")
    ended(job, 2, START, "script 'no_such.py' does not exist", "hint: looked in ")


def test_c86_a_session_again_and_again(service: Daemons, no_leaks: None) -> None:
    def cycle(turn: int) -> None:
        start = time.monotonic()
        with pair(service) as job:
            require_sums(job, "w", turn)
            for plain in job:
                plain.close()
                plain.close()
        for plain in job:
            (found,) = outcomes(partial(plain.total, "w", mine(0, 1)))
            error(found, UsageError, "has been shut down", "gradsum.init()")
        assert time.monotonic() - start < 0.5 or turn == 0

    before = [process.rss for process in service.all]
    for turn in range(50):
        cycle(turn)
    for process, rss in zip(service.all, before, strict=True):
        assert process.rss - rss < 10e6, process.name


def test_calls_that_are_not_allowed_say_why(service: Daemons) -> None:
    """Names, init and shutdown as users call them: see wrong_usage.py, where the checks are."""
    place = {"GRADSUM_COORDINATOR": service.address, "WORLD_SIZE": "2"}
    started = [
        service.spawn("usage", [sys.executable, USAGE], RANK=str(rank), **place) for rank in (0, 1)
    ]
    for process in started:
        assert process.wait(40.0) == 0, process.err
        assert process.out.splitlines()[-1] == "all checked"
