"""Which routing id of a ROUTER has lost its connection, within milliseconds of it.

ZeroMQ tells a ROUTER nothing when a peer goes. But each received frame knows the descriptor of the
connection that it came by (SRCFD; only those of the oldest protocol, which no member speaks, do
not), and the socket's monitor tells which descriptor was closed. One
I/O thread makes both streams; the monitor's events are taken before a routing id is noted, so an
event that follows is not about an earlier connection with the same descriptor. A connection that
was closed before its first message was read is reported with the next one of its descriptor; until
then the ROUTER itself refuses to send to it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from gradsum.errors import ProtocolError
from gradsum.proto.transport.sockets import Socket

_REMEMBERED: Final = 4096


class Closings:
    """Watches one ROUTER; ``descriptor`` becomes readable (edge-triggered) when there is news."""

    __slots__ = ("_closed", "_fds", "_monitor", "_news", "_peers", "_router")

    def __init__(self, router: Socket) -> None:
        self._router = router
        self._monitor = router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._fds: dict[int, list[bytes]] = {}
        self._peers: set[bytes] = set()
        self._closed: OrderedDict[bytes, None] = OrderedDict()
        self._news: list[bytes] = []

    @property
    def descriptor(self) -> int:
        """For an event loop; after it fires, and after each receive, call ``take``."""
        return int(self._monitor.getsockopt(zmq.FD))

    def note(self, frame: zmq.Frame, peer: bytes) -> None:
        """``frame`` was received from ``peer``. ProtocolError when it does not say by what."""
        if peer in self._peers or peer in self._closed:
            return
        self._drain()
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            raise ProtocolError("a peer that speaks an old ZMTP") from None
        self._peers.add(peer)
        self._fds.setdefault(descriptor, []).append(peer)

    def take(self) -> list[bytes]:
        """The routing ids whose connections have closed since the last call."""
        self._drain()
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Stop watching."""
        self._router.disable_monitor()
        self._monitor.close(0)

    def _drain(self) -> None:
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            for peer in self._fds.pop(int(event["value"]), ()):
                self._peers.remove(peer)
                self._remember(peer)
                self._news.append(peer)

    def _remember(self, peer: bytes) -> None:
        """Messages of a closed connection may still be queued: they must not bring it back."""
        self._closed[peer] = None
        if len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)
