"""C97: whatever comes in on the ports, daemons live, stay small and quiet, and sums stay right."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from gradsum.proto import control, data, peer
from gradsum.proto.address import parse_address
from gradsum.proto.control import CONTROL
from gradsum.proto.limits import PROTOCOL
from gradsum.proto.transport.client import request
from tests.e2e.daemons import Daemons, Process, running, until
from tests.e2e.plain_worker import Plain, expected, members, mine, outcomes

pytestmark = pytest.mark.slow

Port = tuple[str, int]
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
LONG_FRAME = b"\x02"
DEEP = (b"\x91" * 100_000 + b"\xc0", b"\x81\xa1a" * 30_000 + b"\xc0")
LIES = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1", b"")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    with running(tmp_path_factory.mktemp("service"), workers=2, servers=1) as daemons:
        yield daemons


@pytest.fixture
def job(service: Daemons) -> Iterator[list[Plain]]:
    with members([service.settings(rank, 2) for rank in (0, 1)]) as found:
        yield found


def ports(process: Process) -> list[Port]:
    """Where a process listens, from /proc/net/tcp."""
    own = set()
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        target = str(entry.readlink())
        if target.startswith("socket:["):
            own.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in own:
                address, _, port = words[1].rpartition(":")
                found.append((address, int(port, 16)))
    return found


@contextmanager
def sums_meanwhile(job: list[Plain]) -> Iterator[list[int]]:
    """The job sums without a break; yields a list of the rounds done. Each sum is checked."""
    stop, rounds = threading.Event(), [0]

    def run() -> None:
        while not stop.is_set():
            turn = rounds[0] + 1
            work = [partial(plain.total, "w", mine(r, turn)) for r, plain in enumerate(job)]
            for got in outcomes(*work):
                assert np.array_equal(got, expected(2, turn)), got
            rounds[0] = turn

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield rounds
        assert thread.is_alive(), "a sum was wrong or failed"
        before = rounds[0]
        until(lambda: rounds[0] > before + 2, 10.0, "sums still come")
    finally:
        stop.set()
        thread.join(30.0)


@contextmanager
def unharmed(service: Daemons, job: list[Plain], lines: int, growth: float) -> Iterator[None]:
    """Daemons live, grow by less than ``growth`` bytes and log at most ``lines`` lines each."""
    memory = {process.name: process.rss for process in service.all}
    logged = {process.name: len(process.err.splitlines()) for process in service.all}
    with sums_meanwhile(job):
        yield
        digested(service)
    for process in service.all:
        assert process.running
        assert process.rss - memory[process.name] < growth, process.name
        said = process.err.splitlines()[logged[process.name] :]
        assert len(said) <= lines, said
        assert "Traceback" not in process.err


def digested(service: Daemons) -> None:
    """Wait until the daemons have read what was sent: the coordinator answers, and its news of the
    server's rejected messages stay the same for three heartbeats."""
    seen: list[int] = []

    def still() -> bool:
        time.sleep(0.5)
        seen.append(rejected(service))
        return len(set(seen[-4:])) == 1 and len(seen) >= 4

    until(still, 20.0, "all junk is read")


def rejected(service: Daemons) -> int:
    """How many messages the server has thrown away."""
    reply = request(parse_address(service.address), control.StatusQuery(1), 10.0)
    return int(reply.status["servers"][0]["info"].get("rejected", 0))


def everywhere(service: Daemons) -> list[Port]:
    return [("127.0.0.1", port) for process in service.all for _, port in ports(process)]


def test_c91_all_ports_are_on_loopback(service: Daemons) -> None:
    assert [len(ports(process)) for process in service.all] == [1, 2]
    for process in service.all:
        assert {address for address, _ in ports(process)} == {"0100007F"}
    assert service.address == f"127.0.0.1:{ports(service.all[0])[0][1]}"


def test_c97_connections_that_are_no_peers(service: Daemons, job: list[Plain]) -> None:
    rng = random.Random(97)
    announced = GREETING + READY + LONG_FRAME
    texts: list[Callable[[], bytes]] = [
        lambda: rng.randbytes(rng.randrange(1, 3000)),
        lambda: b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        lambda: b"",
        lambda: b"\x01\x00" + b"\x05\x00old-1",
        lambda: GREETING[: rng.randrange(len(GREETING))],
        lambda: GREETING + rng.randbytes(40),
        lambda: announced + (1 << 40).to_bytes(8, "big") + bytes(1000),
        lambda: announced + ((1 << 63) + 5).to_bytes(8, "big") + bytes(1000),
    ]
    with unharmed(service, job, lines=6, growth=20e6), ExitStack() as stack:
        for port in everywhere(service):
            for text in texts:
                for _ in range(40):
                    raw = stack.enter_context(socket.create_connection(port, 5.0))
                    try:
                        raw.sendall(text())
                    except ConnectionError:
                        continue  # refused in the middle of it


def originals(job: list[Plain]) -> list[bytes]:
    """Messages as members send them; what they hold of rank 0 is right but for the token."""
    hello = job[0].session._membership.hello
    core = job[0].session._comm.core
    assert core is not None and core.plan is not None
    place = (core.plan.job, core.plan.epoch)
    header = data.attach(*place, 0, core.incarnation, 1, b"guess")
    envelope = peer.Envelope(
        PROTOCOL, *place, 0, core.incarnation, 1, 1,
        (peer.Attach(b"guess", "", b""), peer.Ack(0, 0, 1)),
    )
    messages = (
        hello._replace(token=b"guess"), control.StatusQuery(1), control.Register(1, "", ()),
        control.Heartbeat(b"guess", 9, 9, 9, b"", 0.0, {}), control.Leave("x"),
        control.Abort("x"), control.Replan(1, 0, 0), control.FetchPlan(0), control.PlanAck(1),
    )  # fmt: skip
    pushed = header._replace(kind=data.PUSH, version=2, mask=b"", length=16)
    return [
        *map(CONTROL.encode, messages), data.encode_header(header), data.encode_header(pushed),
        peer.encode_envelope(envelope),
    ]  # fmt: skip


def mutated(rng: random.Random, original: bytes) -> bytes:
    changed = bytearray(original)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed[: rng.randrange(1, len(changed))] if rng.random() < 0.3 else changed)


def bad_messages(rng: random.Random, job: list[Plain]) -> Iterator[Sequence[bytes]]:
    yield from ([], [b""] * 50, [b"x" * 100] * 50, *([text] for text in (*DEEP, *LIES)))
    yield [msgpack.packb([1 << 63])]
    for original in originals(job):
        yield from ([original], [original, bytes(16)], [original, bytes(16), b""])
        yield from ([mutated(rng, original), bytes(16)] for _ in range(10))
        yield from ([mutated(rng, original)] for _ in range(60))
    newer = job[0].session._membership.hello._replace(protocol=PROTOCOL + 1)
    yield from ([CONTROL.encode(newer)] for _ in range(100))
    for _ in range(300):
        yield [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 4))]


def send_all(context: zmq.Context[zmq.Socket[bytes]], port: Port, texts: list[list[bytes]]) -> None:
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect("tcp://{}:{}".format(*port))
        for frames in texts:
            dealer.send_multipart(frames or [b""])
        dealer.send(bytes(1 << 20))
        dealer.send_multipart([texts[-1][0], bytes(2 << 20)])
        dealer.close(5_000)


def test_c97_peers_that_talk_nonsense(service: Daemons, job: list[Plain]) -> None:
    rng = random.Random(97)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def attack() -> None:
        texts = [list(frames) for frames in bad_messages(rng, job)]
        for port in everywhere(service):
            send_all(context, port, texts)

    try:
        attack_twice(service, job, attack)
    finally:
        context.destroy(linger=0)


def attack_twice(service: Daemons, job: list[Plain], attack: Callable[[], None]) -> None:
    """The second time nothing is left to grow."""
    before = rejected(service)
    with unharmed(service, job, lines=12, growth=20e6):
        attack()
    assert rejected(service) - before > 1500, "it did arrive"
    with unharmed(service, job, lines=12, growth=5e6):
        attack()


def test_c97_a_stopped_flood_leaves_the_service_to_the_next_job(service: Daemons) -> None:
    with members([service.settings(rank, 2) for rank in (0, 1)]) as job:
        with sums_meanwhile(job):
            pass
    status = outcomes(lambda: service.gradsum(
        "status", "status", "--coordinator", service.address, "--json").wait(20.0))  # fmt: skip
    assert status == [0]


def test_another_protocol_version_is_refused_with_both_named(
    service: Daemons, job: list[Plain]
) -> None:
    plain, server = job[0], service.servers[0]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connection = plain.session._comm._servers._connections[0].info
    header = data.attach("default", 1, 0, 1, 1, b"t")._replace(protocol=PROTOCOL + 6)
    envelope = peer.Envelope(PROTOCOL + 7, "default", 1, 0, 1, 1, 1, ())
    try:
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(f"tcp://{service.address}")
            newer = plain.session._membership.hello._replace(protocol=PROTOCOL + 5)
            start = time.monotonic()
            dealer.send(CONTROL.encode(newer))
            assert dealer.poll(5000, zmq.POLLIN)
            refusal = CONTROL.decode(dealer.recv())
            assert time.monotonic() - start < 1.0
        assert isinstance(refusal, control.Refusal)
        assert f"protocol version {PROTOCOL + 5} meets version {PROTOCOL}" in refusal.message
        assert "same release" in refusal.hint
        for address, text, version in (
            (connection.data, data.encode_header(header), PROTOCOL + 6),
            (connection.control, peer.encode_envelope(envelope), PROTOCOL + 7),
        ):
            with context.socket(zmq.DEALER) as dealer:
                dealer.connect(address)
                until(partial(_said, dealer, text, server, version), 12.0, f"version {version}")
    finally:
        context.destroy(linger=0)


def _said(dealer: zmq.Socket[bytes], text: bytes, server: Process, version: int) -> bool:
    """Such lines come at a limited rate: send until one of them is about this version."""
    dealer.send(text)
    time.sleep(0.05)
    return f"of protocol {version}, this is {PROTOCOL}" in server.err
