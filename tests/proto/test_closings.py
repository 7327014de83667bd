"""A ROUTER's owner learns which routing id has lost its connection."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
import zmq

from gradsum.errors import ProtocolError
from gradsum.proto.address import Address
from gradsum.proto.transport.closings import Closings
from gradsum.proto.transport.sockets import (
    CONTROL_LIMIT,
    Context,
    Socket,
    bind_router,
    connect_dealer,
    new_context,
)

Bound = tuple[Context, Socket, Address, Closings]


@pytest.fixture
def bound() -> Iterator[Bound]:
    context = new_context()
    router, address = bind_router(context, "127.0.0.1", 0, max_message=CONTROL_LIMIT)
    closings = Closings(router)
    yield context, router, address, closings
    closings.close()
    router.close(0)
    context.destroy(linger=0)


def receive(router: Socket, closings: Closings) -> tuple[bytes, bytes]:
    assert router.poll(5000, zmq.POLLIN)
    frames = router.recv_multipart(copy=False)
    closings.note(frames[-1], frames[0].bytes)
    return frames[0].bytes, frames[1].bytes


def closed(closings: Closings, count: int, eventually: Callable[..., None]) -> list[bytes]:
    """The first ``count`` closings."""
    seen: list[bytes] = []

    def look() -> bool:
        seen.extend(closings.take())
        return len(seen) >= count

    eventually(look, what=f"{count} closings")
    return seen


def test_each_closed_connection_is_named_once(
    bound: Bound, eventually: Callable[..., None]
) -> None:
    context, router, address, closings = bound
    peers: dict[bytes, Socket] = {}
    for number in range(3):
        socket = connect_dealer(context, address, max_message=CONTROL_LIMIT)
        socket.send(b"%d" % number)
        peers[receive(router, closings)[0]] = socket
    assert closings.take() == []
    gone, *others = peers
    peers[gone].close(0)
    assert closed(closings, 1, eventually) == [gone]
    for other in others:
        peers[other].close(0)
    assert sorted(closed(closings, 2, eventually)) == sorted(others)


def test_a_descriptor_that_is_used_again_is_not_mistaken(
    bound: Bound, eventually: Callable[..., None]
) -> None:
    """Messages and closings are only looked at after 30 short connections, one after another."""
    context, router, address, closings = bound
    for number in range(30):
        socket = connect_dealer(context, address, max_message=CONTROL_LIMIT)
        socket.send(b"%d" % number)
        assert router.poll(5000, zmq.POLLIN)
        socket.close(1000)
    last = connect_dealer(context, address, max_message=CONTROL_LIMIT)
    last.send(b"last")
    found: dict[bytes, bytes] = {}
    while b"last" not in found.values():
        peer, text = receive(router, closings)
        found[peer] = text
    alive = next(peer for peer, text in found.items() if text == b"last")
    assert alive not in closings.take()
    last.close(0)
    assert alive in closed(closings, 1, eventually)


def test_what_a_closed_connection_left_in_the_queue_does_not_bring_it_back(
    bound: Bound, eventually: Callable[..., None]
) -> None:
    context, router, address, closings = bound
    socket = connect_dealer(context, address, max_message=CONTROL_LIMIT)
    socket.send(b"one")
    peer, _ = receive(router, closings)
    socket.send(b"two")
    assert router.poll(5000, zmq.POLLIN)
    socket.close(1000)
    assert closed(closings, 1, eventually) == [peer]
    assert receive(router, closings) == (peer, b"two")
    assert closings.take() == []


def test_c97_a_message_without_a_known_connection_is_junk(bound: Bound) -> None:
    """ZMTP 1.0 needs no handshake that we could refuse: an identity frame, then the message."""
    _, router, address, closings = bound
    with socket.create_connection((address.host, address.port), 5.0) as raw:
        raw.sendall(b"\x01\x00" + b"\x05\x00junk")
        assert router.poll(5000, zmq.POLLIN)
        frames = router.recv_multipart(copy=False)
        assert frames[-1].bytes == b"junk"
        with pytest.raises(ProtocolError, match="old ZMTP"):
            closings.note(frames[-1], frames[0].bytes)
    assert closings.take() == []
