"""Servers: the connections of one worker to all servers of its plan, and the memory they share.

Owned by the comm thread; all that is read or sent on data connections passes here. What shared
memory cannot do is done by TCP: a server whose memory cannot be read gets a new connection that
does not offer it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Final

import zmq

from gradsum.config import Settings
from gradsum.errors import ConfigError, ProtocolError
from gradsum.proto import data, peer
from gradsum.proto.control import ServerInfo
from gradsum.proto.data import Header
from gradsum.proto.transport.shared import SharedMemory
from gradsum.proto.transport.sockets import Context
from gradsum.worker.connection import Connection
from gradsum.worker.events import SendPush

BATCH: Final = 32
"""Data frames taken from one server before the others have their turn."""

log = logging.getLogger("gradsum.worker")


class Servers:
    """Connections by their server's place in the plan."""

    def __init__(
        self, context: Context, poller: zmq.Poller, settings: Settings, memory: SharedMemory
    ) -> None:
        self._context = context
        self._poller = poller
        self._settings = settings
        self._memory = memory
        self._connections: dict[int, Connection] = {}

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._connections.values()))

    def missing(self, servers: Iterable[ServerInfo]) -> Iterator[int]:
        """Make a connection for each server that has none; its sockets come with ``renew``."""
        for info in servers:
            if info.number not in self._connections:
                connection = Connection(
                    self._context, info, self._settings.suspect, self._memory
                )
                self._connections[info.number] = connection
                yield info.number

    def renew(self, server: int, *, remote: bool = False) -> tuple[int, bool]:
        """Close the sockets of a server and open new ones; the generation, and whether shared
        memory is offered to it. ``remote``: it cannot be shared, from now on."""
        connection = self._connections[server]
        if connection.data is not None:
            self._poller.unregister(connection.data)
            self._poller.unregister(connection.control)
        if remote and not connection.remote:
            connection.remote = True
            log.warning("shared memory with server %d cannot be read: TCP from now on", server)
        generation = connection.renew()
        self._poller.register(connection.data, zmq.POLLIN)
        self._poller.register(connection.control, zmq.POLLIN)
        return generation, not connection.remote

    def linked(self, server: int, local: bool) -> None:
        """The server has answered; ``local``: it can read our memory.

        ConfigError when the transport setting allows nothing else.
        """
        self._connections[server].local = local
        if local:
            self._memory.active = True
        elif self._settings.transport == "shm":
            raise ConfigError(
                f"server {server} shares no memory with this process (transport shm)",
                peer=f"server {server}",
                hint="it must run on this host, in the same namespaces and for the same user; "
                "--transport auto takes TCP where that is not so",
            )

    def transports(self) -> dict[int, str]:
        """How payloads travel, by server: "shm" or "tcp"."""
        return {c.info.number: "shm" if c.local else "tcp" for c in self}

    def send(self, action: SendPush) -> None:
        """A push."""
        connection, flight = self._connections[action.server], action.flight
        flight.kept = connection.send(action.header, action.payload, flight.kept)

    def attach(self, server: int, header: Header) -> None:
        """Bind a data connection."""
        self._connections[server].send(header, None)

    def tell(self, server: int, envelope: peer.Envelope) -> None:
        """A control envelope."""
        self._connections[server].tell(envelope)

    def incarnation(self, server: int) -> int:
        """Of the server."""
        return self._connections[server].info.incarnation

    def generation(self, server: int) -> int:
        """Of the connection."""
        return self._connections[server].generation

    def receive(self, connection: Connection) -> Iterator[tuple[Header, memoryview | None] | None]:
        """A batch of data frames; None for one whose place cannot be read: renew as remote."""
        for _ in range(BATCH):
            received = connection.receive()
            if received is None:
                return
            header, payload = received
            if header.kind != data.PLACED_SUM:
                yield received
                continue
            try:
                yield header._replace(kind=data.SUM), self._read(payload, header.length)
            except ProtocolError as error:
                log.warning("server %d: %s", connection.info.number, error.message)
                yield None
                return

    def _read(self, place: Any, length: int) -> memoryview:
        if place is None:
            raise ProtocolError("a placed sum without its place")
        return self._memory.read(place, length)

    def close(self) -> None:
        """Drop all sockets."""
        for connection in self._connections.values():
            connection.close()
