"""Questions about ports that need a plain socket for a moment."""

from __future__ import annotations

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody has now. For others to bind: our own daemons bind port 0 instead.

    Raises OSError when the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def reachable(host: str, port: int, timeout: float) -> str | None:
    """None if something accepts TCP connections there, else why not."""
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
