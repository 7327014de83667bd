"""Connection: the two sockets between this worker and one server.

Data frames (pushes out, sums in) and control envelopes have a socket each, so grants never wait
behind queued bytes (F4). A new generation means new sockets; the old ones close with linger 0 (F6).
With a server of this host payloads stay in shared memory, and frames carry their places (DESIGN 7).
"""

from __future__ import annotations

from typing import Any

import zmq

from gradsum.errors import ProtocolError
from gradsum.proto import data, peer
from gradsum.proto.address import parse_address
from gradsum.proto.control import ServerInfo
from gradsum.proto.data import Header, decode_header, encode_header
from gradsum.proto.transport.shared import SharedMemory
from gradsum.proto.transport.sockets import (
    CONTROL_LIMIT,
    DATA_LIMIT,
    Context,
    connect_dealer,
)


class Connection:
    """Owned by the comm thread; ``generation`` counts the sockets made for this server."""

    __slots__ = ("_context", "_heartbeat", "_memory", "control", "data", "generation", "info",
                 "local", "remote")  # fmt: skip

    def __init__(
        self, context: Context, info: ServerInfo, heartbeat: float, memory: SharedMemory
    ) -> None:
        self._context = context
        self._heartbeat = heartbeat
        self._memory = memory
        self.info = info
        self.generation = 0
        self.data: Any = None
        self.control: Any = None
        self.local = False
        self.remote = False
        """Whether shared memory was tried with this server and failed."""

    def renew(self) -> int:
        """Close what is open and connect again; the new generation."""
        self.close()
        self.generation += 1
        self.local = False
        self.data = connect_dealer(
            self._context, parse_address(self.info.data), max_message=DATA_LIMIT,
            heartbeat=self._heartbeat,
        )  # fmt: skip
        self.control = connect_dealer(
            self._context, parse_address(self.info.control), max_message=CONTROL_LIMIT,
            heartbeat=self._heartbeat,
        )  # fmt: skip
        return self.generation

    def send(self, header: Header, payload: memoryview | None, kept: Any = None) -> Any:
        """A data frame. Returns what must be kept until the sum is in: a copy in shared memory,
        which a repetition takes as ``kept``; ZeroMQ itself keeps a payload until it is written."""
        if payload is None:
            self.data.send(encode_header(header))
            return None
        place = None
        if self.local and payload.nbytes:
            place, kept = self._lay(payload, kept)
        if place is not None:
            header = header._replace(kind=data.PLACED_PUSH)
            self.data.send(encode_header(header), zmq.SNDMORE)
            self.data.send(place)
        else:
            self.data.send(encode_header(header), zmq.SNDMORE)
            self.data.send(payload, copy=False)
        return kept

    def _lay(self, payload: memoryview, kept: Any) -> tuple[bytes | None, Any]:
        place = self._memory.lay(payload if kept is None else kept)
        if place is None:
            copied = self._memory.copy(payload)
            if copied is not None:
                kept, place = copied
        return place, kept

    def tell(self, envelope: peer.Envelope) -> None:
        """A control envelope."""
        self.control.send(peer.encode_envelope(envelope))

    def receive(self) -> tuple[Header, memoryview | None] | None:
        """The next data frame, its payload still in the received memory; None: nothing there."""
        try:
            frames = self.data.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        if len(frames) > 2:
            raise ProtocolError(f"server {self.info.number}: {len(frames)} frames in a message")
        header = decode_header(frames[0].buffer)
        payload = frames[1].buffer if len(frames) == 2 else None
        return header, payload

    def hear(self) -> peer.Envelope | None:
        """The next control envelope; None: nothing there."""
        try:
            return peer.decode_envelope(self.control.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        """Drop both sockets; what was not sent is lost, which the protocol allows."""
        for socket in (self.data, self.control):
            if socket is not None:
                socket.close(0)
        self.data = self.control = None
