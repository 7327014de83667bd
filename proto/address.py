"""HOST:PORT texts, with brackets for IPv6; parsing only, nothing is resolved here."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from gradsum.errors import ConfigError


class Address(NamedTuple):
    """A host name or literal (IPv6 without brackets) and a TCP port (0: any free one)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """The ZeroMQ endpoint."""
        return f"tcp://{self}"


def parse_address(text: str, what: str = "address") -> Address:
    """``"host:port"`` or ``"[v6]:port"``; ConfigError says what is wrong with anything else."""
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"{what} {text!r} is not HOST:PORT", hint="for example 127.0.0.1:7700")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{what} {text!r}: an IPv6 host needs brackets", hint="[::1]:7700")
    if not host:
        raise ConfigError(f"{what} {text!r} has no host", hint="for example 127.0.0.1:7700")
    return Address(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether a literal or "localhost" stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
