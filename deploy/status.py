"""``gradsum status``: what the coordinator says about its job, its members and its servers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradsum.config import Settings
from gradsum.errors import ProtocolError
from gradsum.proto.address import parse_address
from gradsum.proto.control import StatusQuery, StatusReply
from gradsum.proto.transport.client import request

Row = Sequence[Any]


def run(settings: Settings, timeout: float, *, as_json: bool) -> int:
    """Ask, print, return 0. Raises Unreachable after ``timeout`` seconds without an answer."""
    status = ask(settings.coordinator or "", timeout)
    print(json.dumps(status, indent=2) if as_json else "\n".join(describe(status)))
    return 0


def ask(coordinator: str, timeout: float) -> dict[str, Any]:
    """The coordinator's picture of itself. Raises Unreachable, ConfigError or ProtocolError."""
    address = parse_address(coordinator, "--coordinator")
    reply = request(address, StatusQuery(1), timeout)
    if not isinstance(reply, StatusReply):
        raise ProtocolError(
            f"{address} answered with {type(reply).__name__}",
            peer=str(address),
            hint="is it a coordinator of this gradsum release?",
        )
    return reply.status


def describe(status: Mapping[str, Any]) -> Iterator[str]:
    """The lines that people read."""
    members, servers = status["members"], status["servers"]
    yield f"job      {status['job'] or 'none'}"
    here = f"{len(members)} of {status['workers']} workers"
    yield f"members  {here}, {len(servers)} of {status['servers_expected']} servers"
    if status["missing"]:
        yield f"waiting  {status['missing']}"
    if status.get("failure"):
        yield f"failed   {status['failure']}"
    if status.get("tensors"):
        yield (
            f"plan     epoch {status['epoch']}, {status['tensors']} tensors, "
            f"{amount(status['bytes'])}, slices of {amount(status['slice_bytes'])}"
        )
    for tag, ranks in dict(status.get("gathers") or {}).items():
        yield f"gather   {tag} waits for ranks {', '.join(map(str, ranks))}"
    if members:
        yield ""
        yield from columns(
            ("worker", "host", "pid", "state", "step", "epoch", "idle s", "heard s", "links",
             "uplink"),
            [_worker(member) for member in members],
        )
    if servers:
        yield ""
        yield from columns(
            ("server", "host", "pid", "state", "address", "weight", "epoch", "heard s"),
            [_server(server) for server in servers],
        )


def _worker(member: Mapping[str, Any]) -> Row:
    keys = ("rank", "host", "pid", "state", "step", "epoch")
    info = member.get("info") or {}
    rate = info.get("uplink") or 0.0
    uplink = f"{amount(rate)}/s" if rate else "-"
    times = f"{member['idle']:.1f}", f"{member['age']:.1f}"
    return *(member[key] for key in keys), *times, _links(info.get("links") or {}), uplink


def _links(links: Mapping[str, str]) -> str:
    """How payloads travel to the servers: ``shm x 2, tcp x 1``."""
    count = Counter(links.values())
    return ", ".join(f"{way} x {count[way]}" for way in sorted(count)) or "-"


def _server(server: Mapping[str, Any]) -> Row:
    address = server["address"].removeprefix("tcp://")
    weight = "-" if server["weight"] is None else f"{server['weight']:g}"
    first = [server[key] for key in ("index", "host", "pid", "state")]
    return *first, address, weight, server["epoch"], f"{server['age']:.1f}"


def columns(head: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    """A table with columns as wide as they must be."""
    cells = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def amount(number: float) -> str:
    """Bytes for people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"
