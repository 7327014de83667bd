"""``gradsum doctor``: is this machine fit, are the settings meant, can everybody be reached.

Rules: a check is a small function that yields findings; it never raises for what it looks at, never
changes anything, and has a deadline for everything beyond this machine. The exit code is 1 if any
finding is a failure.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil
import zmq

from gradsum.config import Settings, suggestion
from gradsum.deploy.status import amount, ask, columns
from gradsum.errors import GradsumError
from gradsum.proto.address import is_loopback, parse_address
from gradsum.proto.transport.ports import free_port, reachable

OK, WARN, FAIL = "ok", "warn", "fail"
_MIB = 1 << 20
_WANTED_FILES = 1024
_WANTED_MEMORY = 512 * _MIB
_WANTED_SHM = 64 * _MIB


class Finding(NamedTuple):
    """What a check saw: ``level`` is ok, warn or fail; a hint where something can be done."""

    name: str
    level: str
    text: str
    hint: str = ""


class Look(NamedTuple):
    """What the checks go by."""

    settings: Settings
    timeout: float


def run(settings: Settings, timeout: float, *, as_json: bool) -> int:
    """Check everything, print the findings and the settings; 1 if something fails."""
    found = examine(Look(settings, timeout))
    rows = [(name, _shown(value), origin, doc) for name, value, origin, doc in settings.table()]
    if as_json:
        keys = ("name", "value", "origin", "doc")
        table = [dict(zip(keys, row, strict=True)) for row in settings.table()]
        print(json.dumps({"checks": [f._asdict() for f in found], "settings": table}, indent=2))
    else:
        for finding in found:
            print(f"{finding.level:4}  {finding.name}: {finding.text}")
            if finding.hint and finding.level != OK:
                print(f"      hint: {finding.hint}")
        print()
        print("\n".join(columns(("setting", "value", "from", "meaning"), rows)))
    return int(any(finding.level == FAIL for finding in found))


def examine(look: Look) -> list[Finding]:
    """All findings, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(look)]


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)


def _python(look: Look) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding("python", OK if good else FAIL, f"{version} ({sys.executable})", "use 3.11 or up")


def _packages(look: Look) -> Iterator[Finding]:
    """Installed versions; nothing heavy is imported for them."""
    for name in ("gradsum", "torch", "pyzmq", "numpy", "msgpack", "uvloop", "psutil"):
        try:
            yield Finding(name, OK, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            # servers of float32 sums need no torch, and asyncio does uvloop's work
            level = WARN if name in ("torch", "uvloop") else FAIL
            yield Finding(name, level, "not installed", f"pip install {name}")
    yield Finding("libzmq", OK, zmq.zmq_version())


def _cores(look: Look) -> Iterator[Finding]:
    usable, all_ = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    yield Finding("cores", OK, f"{usable} usable of {all_}")


def _memory(look: Look) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    level = OK if memory.available >= _WANTED_MEMORY else WARN
    text = f"{amount(memory.available)} available of {amount(memory.total)}"
    yield Finding("memory", level, text, "a server holds one copy of the tensors it sums")


def _files(look: Look) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = OK if soft >= _WANTED_FILES or soft == resource.RLIM_INFINITY else WARN
    yield Finding(
        "open files", level, f"ulimit -n {soft} (hard {hard})", f"ulimit -n {_WANTED_FILES} or more"
    )


def _shared_memory(look: Look) -> Iterator[Finding]:
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        text, hint = f"/dev/shm: {error.strerror}", "mount a tmpfs there"
        yield Finding("shared memory", WARN, text, hint)
        return
    free = found.f_bavail * found.f_frsize
    level = OK if free >= _WANTED_SHM else WARN
    yield Finding(
        "shared memory", level, f"{amount(free)} free in /dev/shm", "containers: --shm-size 1g"
    )


def _listening(look: Look) -> Iterator[Finding]:
    for host in dict.fromkeys(("127.0.0.1", look.settings.bind)):
        try:
            free_port(host)
            yield Finding("listen", OK, f"can listen on {host}")
        except OSError as error:
            hint = "set --bind to an address of this machine"
            yield Finding("listen", FAIL, f"cannot listen on {host}: {error.strerror}", hint)
    host = look.settings.bind
    if not is_loopback(host) and not look.settings.insecure:
        hint = "bind 127.0.0.1, or add --insecure on a network that you trust"
        yield Finding("listen", WARN, f"daemons refuse {host} without authentication", hint)


def _variables(look: Look) -> Iterator[Finding]:
    for name in look.settings.unknown:
        meant = suggestion(name)
        hint = f"did you mean {meant}?" if meant else "see the settings below"
        yield Finding("variables", WARN, f"{name} means nothing to gradsum", hint)


def _service(look: Look) -> Iterator[Finding]:
    """The coordinator answers (both directions), and each server both to us and to it."""
    address = look.settings.coordinator
    if address is None:
        yield Finding("coordinator", OK, "none is set, nothing to reach")
        return
    start = time.monotonic()
    try:
        status = ask(address, look.timeout)
    except GradsumError as error:
        yield Finding("coordinator", FAIL, error.message, error.hint or "")
        return
    took = (time.monotonic() - start) * 1000
    job = f"job {status['job']}" if status["job"] else "no job"
    yield Finding("coordinator", OK, f"{address} answers in {took:.0f} ms ({job})")
    if status["missing"]:
        yield Finding("members", WARN, f"waiting for {status['missing']}", "start them")
    for server in status["servers"]:
        yield _server(server, address, look)


def _server(server: dict[str, Any], coordinator: str, look: Look) -> Finding:
    name = f"server {server['index']}"
    where = parse_address(server["address"], name)
    heard = f"heard by the coordinator {server['age']:.1f} s ago"
    if not server["connected"] or server["age"] > look.settings.suspect:
        return Finding(name, FAIL, f"last {heard}", f"look at host {server['host']}")
    if is_loopback(where.host) and not is_loopback(parse_address(coordinator).host):
        hint = f"start it with --bind or --advertise on {server['host']}"
        return Finding(name, FAIL, f"gives {where} as its address, which is each host's own", hint)
    why = reachable(where.host, where.port, look.timeout)
    if why is not None:
        hint = "a firewall, or a wrong --advertise of that server"
        return Finding(name, FAIL, f"cannot be reached at {where}: {why}; {heard}", hint)
    return Finding(name, OK, f"reached at {where}; {heard}")


Check = Callable[[Look], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    _python, _packages, _cores, _memory, _files, _shared_memory, _listening, _variables, _service,
)  # fmt: skip
