"""How fast a plain TCP stream is between two processes: what a link carries without us.

Rules: one connection, kernel defaults, no payload kept; every wait has a limit. A sender that
cannot connect, or says nothing, is Unreachable.
"""

from __future__ import annotations

import socket
import time
from typing import Final, Self

from gradsum.errors import Unreachable

LIMIT: Final = 20.0
"""Seconds for a process to start and connect, and for a silence."""

_CHUNK: Final = 1 << 20


class StreamProbe:
    """The receiving end, on a free port of ``host``."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1)
        self._listener.settimeout(LIMIT)
        self.port = int(self._listener.getsockname()[1])
        self.nbytes = 0
        """Of the stream, once it has ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def rate(self) -> float:
        """Bytes per second from the first byte to the end of the one stream that comes."""
        buffer = bytearray(_CHUNK)
        try:
            stream, _ = self._listener.accept()
            with stream:
                stream.settimeout(LIMIT)
                first = stream.recv_into(buffer)
                start, received = time.perf_counter(), 0
                while got := stream.recv_into(buffer):
                    received += got
                took = time.perf_counter() - start
        except OSError as error:
            raise Unreachable(f"the probe of the link heard nothing: {error}") from None
        if not first or not received:
            raise Unreachable("the probe's stream ended before it began")
        self.nbytes = first + received
        return received / took


def send_stream(port: int, seconds: float, host: str = "127.0.0.1") -> None:
    """The sending end: as much as goes through in ``seconds``."""
    chunk = bytes(_CHUNK)
    with socket.create_connection((host, port), LIMIT) as stream:
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            stream.sendall(chunk)
