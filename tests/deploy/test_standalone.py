"""The launcher with the real coordinator, servers and workers, and daemons started by hand."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.deploy.processes import Processes

pytestmark = pytest.mark.slow

MEMBER = str(Path(__file__).with_name("member.py"))
Eventually = Callable[..., None]


def standalone(
    processes: Processes, *acts: str, workers: int = 2, servers: int = 2, options: str = ""
) -> subprocess.Popen[str]:
    words = ("launch", "--standalone", "--nproc-per-node", str(workers), "--servers", str(servers))
    return processes.gradsum(*words, *options.split(), "--", "python", MEMBER, *acts)


def service(
    processes: Processes, eventually: Eventually, workers: int, port: int = 0
) -> tuple[str, subprocess.Popen[str], subprocess.Popen[str]]:
    """A coordinator and one server, started by hand; the address and both processes."""
    file = processes.folder / "address"
    file.unlink(missing_ok=True)
    sizes = ("--workers", str(workers), "--servers", "1")
    coordinator = processes.gradsum(
        "coordinator", "--bind", f"127.0.0.1:{port}", *sizes, "--port-file", str(file)
    )
    eventually(file.exists, limit=20.0, what="the coordinator's port file")
    address = file.read_text().strip()
    server = processes.gradsum("server", "--coordinator", address)
    return address, coordinator, server


def sums(out: str) -> set[str]:
    return {line.partition(" sum ")[2] for line in out.splitlines() if " sum " in line}


def test_c89_a_good_job_ends_with_0_soon_after_the_last_worker(processes: Processes) -> None:
    process = standalone(processes, "sum:a:3", "sum:b:2")
    status, out, err = processes.end(process)
    assert status == 0, err
    assert sums(out) == {"[3.0, 5.0, 7.0]", "[3.0, 5.0]"}
    assert len(out.splitlines()) == 4
    assert "ERROR" not in err
    assert "Traceback" not in err
    assert "gradsum launch" not in err


def test_c89_workers_that_end_apart(processes: Processes) -> None:
    process = standalone(processes, "sum:a:1", "exit:0:0", "print:late")
    status, out, err = processes.end(process)
    assert status == 0, err
    assert "[w1] late" in out


def test_c89_daemons_by_hand_stay_and_end_with_0_on_sigterm(
    processes: Processes, eventually: Eventually
) -> None:
    address, coordinator, server = service(processes, eventually, workers=1)
    for _ in range(2):
        job = processes.gradsum("launch", "--coordinator", address, "--", "python", MEMBER)
        assert processes.end(job)[0] == 0
    assert (coordinator.poll(), server.poll()) == (None, None)
    start = time.monotonic()
    server.terminate()
    coordinator.terminate()
    assert processes.end(server)[0] == 0
    assert processes.end(coordinator)[0] == 0
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("act", "code", "said"),
    [
        ("exit:1:7", 7, "rank 1 failed with exit code 7"),
        ("kill:1", 137, "rank 1 was killed by SIGKILL"),
        ("raise:1", 1, "rank 1 failed with exit code 1: ValueError: boom"),
    ],
)
def test_c19_the_failing_rank_is_named_and_gives_the_code(
    processes: Processes, act: str, code: int, said: str
) -> None:
    start = time.monotonic()
    process = standalone(processes, "sum:a:3", act, "barrier", workers=3, servers=1)
    status, _, err = processes.end(process)
    assert status == code, err
    assert err.count(f"gradsum launch: {said}") == 1
    assert err.count("ValueError: boom") == (2 if act == "raise:1" else 0)
    assert time.monotonic() - start < 15


def test_c19_a_crashed_server_fails_the_job(processes: Processes, eventually: Eventually) -> None:
    process = standalone(processes, "sum:a:3", "touch:ready", "await:never", servers=1)
    eventually((processes.folder / "ready").exists, limit=20.0)
    (pid,) = processes.alive("gradsum server")
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    status, _, err = processes.end(process)
    assert status == 137
    assert f"server 0 (pid {pid}) was killed by SIGKILL" in err
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_c34_a_signal_ends_everything(
    processes: Processes, eventually: Eventually, number: signal.Signals
) -> None:
    process = standalone(processes, "touch:ready", "await:never")
    eventually((processes.folder / "ready").exists, limit=20.0)
    start = time.monotonic()
    process.send_signal(number)
    assert processes.end(process)[0] == 128 + number
    assert time.monotonic() - start < 12
    assert not processes.alive()


def test_c34_a_killed_launcher_takes_everything_along(
    processes: Processes, eventually: Eventually
) -> None:
    process = standalone(processes, "touch:ready", "await:never")
    eventually((processes.folder / "ready").exists, limit=20.0)
    process.kill()
    eventually(lambda: not processes.alive(), limit=10.0)


def test_c85_a_port_that_is_taken_is_named(processes: Processes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ("coordinator", "--bind", address, "--workers", "1", "--servers", "1")
        start = time.monotonic()
        status, _, err = processes.end(processes.gradsum(*words))
    assert status == 2
    assert address in err
    assert "Traceback" not in err
    assert time.monotonic() - start < 5


def test_c85_the_same_port_again_at_once(processes: Processes, eventually: Eventually) -> None:
    port = 0
    for _ in range(2):
        address, coordinator, server = service(processes, eventually, workers=1, port=port)
        port = int(address.rpartition(":")[2])
        words = ("launch", "--coordinator", address, "--", "python", MEMBER, "sum:a:2")
        status, out, _ = processes.end(processes.gradsum(*words))
        assert (status, sums(out)) == (0, {"[1.0, 2.0]"})
        for daemon in (server, coordinator):
            daemon.terminate()
            processes.end(daemon)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_c85_twenty_launchers_at_once(processes: Processes) -> None:
    started = [standalone(processes, "sum:a:2", workers=1, servers=1) for _ in range(20)]
    for process in started:
        out, err = process.communicate(timeout=150)
        assert process.returncode == 0, err
        assert sums(out) == {"[1.0, 2.0]"}


def test_c91_everything_listens_on_loopback_only(
    processes: Processes, eventually: Eventually
) -> None:
    process = standalone(processes, "touch:ready", "await:go")
    eventually((processes.folder / "ready").exists, limit=20.0)
    addresses = [
        connection.laddr.ip
        for pid in processes.alive()
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    (processes.folder / "go").touch()
    assert processes.end(process)[0] == 0
    assert addresses
    assert set(addresses) == {"127.0.0.1"}


def test_c101_one_worker_with_and_without_a_service(processes: Processes) -> None:
    (processes.folder / "train.py").write_text(
        "import gradsum\n"
        "gradsum.init()\n"
        "import torch\n"
        "total = gradsum.push_pull(torch.arange(4.0), average=False, name='t')\n"
        "print(gradsum.rank(), gradsum.size(), total.tolist())\n"
    )
    expected = "0 1 [0.0, 1.0, 2.0, 3.0]\n"
    alone = processes.gradsum("launch", "--", "python", "train.py")
    assert processes.end(alone)[:2] == (0, "[w0] " + expected)
    served = processes.gradsum("launch", "--standalone", "--", "python", "train.py")
    assert processes.end(served)[:2] == (0, "[w0] " + expected)


def test_c16_a_service_outlives_a_killed_job_and_forgets_it(
    processes: Processes, eventually: Eventually
) -> None:
    address, _, _ = service(processes, eventually, workers=2)
    words = ("launch", "--coordinator", address, "--nproc-per-node", "2")
    first = ("--job", "A", "--", "python", MEMBER, "sum:w:4", "sum:w:4", "push:w:4", "kill:1")
    status, _, err = processes.end(processes.gradsum(*words, *first))
    assert status == 137, err
    start = time.monotonic()
    second = ("--job", "B", "--", "python", MEMBER, "sum:w:6")
    status, out, err = processes.end(processes.gradsum(*words, *second))
    assert status == 0, err
    assert sums(out) == {"[3.0, 5.0, 7.0, 9.0, 11.0, 13.0]"}
    assert time.monotonic() - start < 8


def test_c16_a_second_job_meanwhile_is_refused_by_name(
    processes: Processes, eventually: Eventually
) -> None:
    address, _, _ = service(processes, eventually, workers=1)
    words = ("launch", "--coordinator", address)
    first = processes.gradsum(*words, "--job", "A", "--", "python", MEMBER, "touch:ready",
                              "await:go", "sum:w:2")  # fmt: skip
    eventually((processes.folder / "ready").exists, limit=20.0)
    second = processes.gradsum(*words, "--job", "B", "--", "python", MEMBER, "sum:w:3")
    status, _, err = processes.end(second)
    assert status == 1
    assert "'A'" in err
    (processes.folder / "go").touch()
    status, out, _ = processes.end(first)
    assert (status, sums(out)) == (0, {"[1.0, 2.0]"})
