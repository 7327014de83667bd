"""The coordinator process on loopback: a real child, real sockets, real signals."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from gradsum.errors import ConfigError
from gradsum.proto.address import Address, parse_address
from gradsum.proto.codec import pack
from gradsum.proto.control import (
    CONTROL,
    Abort,
    Failed,
    Heartbeat,
    HeartbeatReply,
    JobEnd,
    Leave,
    Left,
    PlanAck,
    PlanMessage,
    Refusal,
    StatusQuery,
    StatusReply,
    Waiting,
    Welcome,
)
from gradsum.proto.transport.sockets import (
    CONTROL_LIMIT,
    Socket,
    bind_router,
    connect_dealer,
    new_context,
)

from .cast import hello

LIMIT = 10.0
PROGRAM = """
import sys
from pathlib import Path
from gradsum.config import Settings
from gradsum.errors import ConfigError
from gradsum.log import setup
from gradsum.scheduler.coordinator import run

setup("INFO", "text", "[coordinator]")
host, port, workers, servers, once, port_file = sys.argv[1:]
file = Path(port_file) if port_file else None
try:
    sys.exit(run(Settings(), host, int(port), int(workers), int(servers), once == "1", file))
except ConfigError as error:
    sys.exit(f"error: {error}")
"""


class Coordinator:
    """A coordinator process; ``peer`` opens connections to it."""

    def __init__(self, workers: int, servers: int, once: bool = False, port_file: str = "") -> None:
        args = ["127.0.0.1", "0", str(workers), str(servers), str(int(once)), port_file]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.address = parse_address(self.line.split()[3])
        self.context = new_context()

    def peer(self) -> Peer:
        """A new connection."""
        return Peer(connect_dealer(self.context, self.address, max_message=CONTROL_LIMIT))

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(LIMIT)

    def close(self) -> str:
        """End everything; returns what was logged."""
        self.context.destroy(linger=0)
        self.process.kill()
        out, err = self.process.communicate(timeout=LIMIT)
        return f"{out}{err}"


class Peer:
    """One DEALER."""

    def __init__(self, socket: Socket) -> None:
        self.socket = socket

    def send(self, message: tuple[Any, ...]) -> None:
        """A control message."""
        self.socket.send(CONTROL.encode(message))

    def want(self, kind: type[Any]) -> Any:
        """The next message of a kind; others are passed over."""
        end = time.monotonic() + LIMIT
        while self.socket.poll(max(0, int((end - time.monotonic()) * 1000)), zmq.POLLIN):
            message = CONTROL.decode(self.socket.recv())
            if isinstance(message, kind):
                return message
        pytest.fail(f"no {kind.__name__} in {LIMIT} s")


@pytest.fixture
def start() -> Iterator[Any]:
    """``start(workers, servers, ...)``: a coordinator that ends with the test."""
    started: list[Coordinator] = []

    def make(*args: Any, **kwargs: Any) -> Coordinator:
        started.append(Coordinator(*args, **kwargs))
        return started[-1]

    yield make
    for coordinator in started:
        coordinator.close()


def begin(coordinator: Coordinator) -> tuple[Peer, list[Peer]]:
    """A running job of one server and two workers."""
    server, workers = coordinator.peer(), [coordinator.peer(), coordinator.peer()]
    server.send(hello("server", 0))
    server.want(Welcome)
    for rank, worker in enumerate(workers):
        worker.send(hello("worker", rank))
        assert worker.want(Welcome).rank == rank
    server.send(PlanAck(server.want(PlanMessage).epoch))
    for worker in workers:
        assert worker.want(PlanMessage).epoch == 1
    return server, workers


@pytest.mark.slow
def test_once_ends_with_0_after_a_good_job(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "port"
    coordinator = start(2, 1, once=True, port_file=str(file))
    assert coordinator.line.startswith("coordinator ready on 127.0.0.1:")
    assert coordinator.line.endswith("(2 workers, 1 servers expected)\n")
    assert parse_address(file.read_text().strip()) == coordinator.address
    server, workers = begin(coordinator)
    for worker in workers:
        worker.send(Leave("done"))
        worker.want(Left)
    assert server.want(JobEnd) == JobEnd("job", False)
    assert coordinator.wait() == 0


@pytest.mark.slow
def test_a_closed_connection_is_noticed_within_a_second(start: Any) -> None:
    coordinator = start(2, 1, once=True)
    server, workers = begin(coordinator)
    begun = time.monotonic()
    workers[1].socket.close(0)
    failure = workers[0].want(Failed)
    assert time.monotonic() - begun < 1.5
    assert (failure.kind, failure.peer, failure.req) == ("PeerLost", "worker 1", 0)
    assert "worker rank 1 (host:pid 101) ended: its connection closed" in failure.message
    workers[0].send(Abort("a peer is lost"))
    assert server.want(JobEnd) == JobEnd("job", True)
    assert coordinator.wait() == 1


@pytest.mark.slow
def test_c97_junk_and_other_protocols_harm_nobody(start: Any) -> None:
    coordinator = start(2, 1)
    server, workers = begin(coordinator)
    stranger = coordinator.peer()
    for junk in (b"", b"\xc1", b"x" * 100_000, pack(("Hello",)), pack(("Nonsense", 1)), pack(7)):
        stranger.socket.send(junk)
    stranger.socket.send_multipart([b"a"] * 50)
    stranger.send(JobEnd("job", True))
    stranger.socket.send(pack(("Hello", 99, "a field of tomorrow")))
    refusal = stranger.want(Refusal)
    assert "version 99" in refusal.message and "version 1 " in refusal.message
    with socket.create_connection(coordinator.address, timeout=LIMIT) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    too_large = coordinator.peer()
    too_large.socket.send(b"x" * (CONTROL_LIMIT + 1))
    workers[0].send(Heartbeat(b"wrong token", 0, 1, 0, b"", 0.0, {}))
    assert "say hello" in workers[0].want(Refusal).message
    workers[1].send(StatusQuery(3))
    status = workers[1].want(StatusReply).status
    assert status["state"] == "running" and len(status["members"]) == 2
    server.send(StatusQuery(4))
    assert server.want(StatusReply).req == 4
    log = coordinator.close()
    assert "ignored (1 so far)" in log and "Traceback" not in log


@pytest.mark.slow
def test_sigterm_when_idle_is_a_quick_exit_0(start: Any) -> None:
    coordinator = start(2, 1)
    begun = time.monotonic()
    coordinator.process.send_signal(signal.SIGTERM)
    assert coordinator.wait() == 0
    assert time.monotonic() - begun < 1.5


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 1), (signal.SIGINT, 130)])
def test_a_signal_tells_everybody_and_ends_a_running_job(
    start: Any, number: int, code: int
) -> None:
    coordinator = start(2, 1)
    server, workers = begin(coordinator)
    coordinator.process.send_signal(number)
    for worker in workers:
        assert worker.want(Failed).kind == "Unreachable"
    assert server.want(JobEnd).failed
    assert coordinator.wait() == code


@pytest.mark.slow
def test_heartbeats_are_answered_while_members_wait(start: Any) -> None:
    coordinator = start(2, 1)
    worker = coordinator.peer()
    worker.send(hello("worker", 1))
    token = worker.want(Welcome).token
    assert "waiting for 1 of 1 servers and for worker rank 0" in worker.want(Waiting).text
    worker.send(Heartbeat(token, 0, 0, 0, b"", 0.0, {}))
    assert worker.want(HeartbeatReply) == HeartbeatReply(0, 0, 0, ())
    assert "rank 0" in worker.want(Waiting).text  # the repeat comes from the timer


@pytest.mark.slow
def test_c77_bursts_of_messages_are_all_answered(start: Any) -> None:
    coordinator = start(2, 1)
    peers = [coordinator.peer() for _ in range(2)]
    for burst in (1, 7, 500, 1000):
        for number in range(burst):
            for peer in peers:
                peer.send(StatusQuery(number))
        for peer in peers:
            assert [peer.want(StatusReply).req for _ in range(burst)] == list(range(burst))


def test_c85_port_in_use_is_named() -> None:
    context = new_context()
    try:
        router, address = bind_router(context, "127.0.0.1", 0, max_message=CONTROL_LIMIT)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{address.port}"):
            bind_router(context, "127.0.0.1", address.port, max_message=CONTROL_LIMIT)
        args = [address.host, str(address.port), "1", "1", "0", ""]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *args], capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode != 0
        assert str(Address("127.0.0.1", address.port)) in done.stderr
        assert "hint:" in done.stderr and "Traceback" not in done.stderr
        router.close(0)
    finally:
        context.term()
