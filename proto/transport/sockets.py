"""ZeroMQ sockets, made here and nowhere else, with every limit set (DESIGN 9).

Rules: one bind function; loopback unless ``insecure`` was asked for; MAXMSGSIZE on every socket; a
handshake has 5 s; a ROUTER reports what it cannot deliver (MANDATORY) and routing ids are generated
by it; linger is 0 unless the caller closes with another (F6); high-water marks are a backstop of
complete messages, the real bound is byte credit (F1); kernel send buffers are small, since what is
in them cannot be overtaken by a more urgent slice (DESIGN 6).
"""

from __future__ import annotations

import os
import socket as bsd
from typing import Any, Final

import zmq

from gradsum.errors import ConfigError, Unreachable
from gradsum.proto.address import Address, is_loopback
from gradsum.proto.limits import MAX_CONTROL, MAX_HEADER, MAX_SLICE

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

CONTROL_LIMIT: Final = MAX_CONTROL
DATA_LIMIT: Final = MAX_SLICE + MAX_HEADER
_HWM: Final = 100_000
_SEND_BUFFER: Final = 256 << 10


def new_context() -> Context:
    """A context of its own for the calling process, one I/O thread."""
    return zmq.Context()


def _set_limits(socket: Any, max_message: int, heartbeat: float) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
    socket.setsockopt(zmq.SNDHWM, _HWM)
    socket.setsockopt(zmq.RCVHWM, _HWM)
    socket.setsockopt(zmq.SNDBUF, _SEND_BUFFER)
    if heartbeat > 0:
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(heartbeat * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(heartbeat * 20_000))


def resolve(host: str) -> str:
    """A numeric address of the host: IPv4 where there is one, since servers bind one address.

    Raises Unreachable for a name that is not known.
    """
    try:
        found = bsd.getaddrinfo(host, None, type=bsd.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(
            f"host {host!r} is not known: {error.strerror}", peer=host, hint="check the address"
        ) from None
    found.sort(key=lambda entry: entry[0] != bsd.AF_INET)
    return str(found[0][4][0])


def bind_router(
    context: Context,
    host: str,
    port: int,
    *,
    max_message: int,
    insecure: bool = False,
    heartbeat: float = 0.5,
) -> tuple[Socket, Address]:
    """A ROUTER bound to exactly host:port (port 0: any free one), and where it really is.

    ConfigError when the address is not loopback and ``insecure`` was not asked for, when the host
    is a wildcard, or when the port is taken.
    """
    if host in ("*", "0.0.0.0", "::"):
        raise ConfigError(
            f"refusing to listen on all interfaces ({host})", hint="bind one address: --bind HOST"
        )
    if not is_loopback(host) and not insecure:
        raise ConfigError(
            f"refusing to listen on {host} without authentication",
            hint="bind 127.0.0.1, or add --insecure when everybody on that network is trusted",
        )
    literal = resolve(host)
    socket = context.socket(zmq.ROUTER)
    try:
        socket.setsockopt(zmq.IPV6, int(":" in literal))
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        _set_limits(socket, max_message, heartbeat)
        socket.bind(Address(literal, port).endpoint)
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(
            f"cannot listen on {Address(host, port)}: {os.strerror(error.errno or 0)}",
            hint="another process holds the port, or the address is not of this machine",
        ) from None
    return socket, Address(literal, int(bytes(bound).rstrip(b"\0").rpartition(b":")[2]))


def connect_dealer(
    context: Context, address: Address, *, max_message: int, heartbeat: float = 0.5
) -> Socket:
    """A DEALER that connects to a ROUTER; returns at once, ZeroMQ connects in the background."""
    literal = resolve(address.host)
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IPV6, int(":" in literal))
    _set_limits(socket, max_message, heartbeat)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
    socket.connect(Address(literal, address.port).endpoint)
    return socket
