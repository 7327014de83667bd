"""Which place a process that says Hello gets, or why it gets none.

Rules: a refusal names cause and remedy, a taken rank its holder. None means "later": the place's
holder may be dead, or the last job is about to end, and a moment decides. A place that looks taken
is only doubtful at first: the end of a killed process may be a few milliseconds behind the Hello of
the next one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gradsum.proto.control import Hello, Refusal
from gradsum.proto.limits import PROTOCOL
from gradsum.scheduler.membership import SERVER, WORKER, Member, Membership, State

MAX_TEXT: Final = 512
"""Bytes of a text field: it is repeated to others."""


class Doubt(NamedTuple):
    """Refused, if it is still so when everybody had the time to show that he is alive."""

    refusal: Refusal


Place = int | Refusal | Doubt | None


def place_for(members: Membership, hello: Hello) -> Place:
    """The rank or server index for a process that is not a member yet."""
    wrong = _malformed(hello)
    if wrong is not None:
        return wrong
    return _server(members) if hello.role == SERVER else _worker(members, hello)


def _malformed(hello: Hello) -> Refusal | None:
    if hello.protocol != PROTOCOL:
        return Refusal(
            f"protocol version {hello.protocol} meets version {PROTOCOL} of the coordinator",
            "install the same release of gradsum everywhere",
        )
    if hello.role not in (SERVER, WORKER):
        return Refusal(f"unknown role {hello.role[:40]!r}", "roles are worker and server")
    if max(map(len, (hello.job, hello.host, hello.data, hello.control, hello.token))) > MAX_TEXT:
        return Refusal(f"a field of Hello is longer than {MAX_TEXT}", "use shorter names")
    return None


def _server(members: Membership) -> Place:
    free = set(range(members.server_count)) - members.servers.keys()
    if free:
        return None if members.sealed else min(free)
    if any(server.closed is not None for server in members.servers.values()):
        return None
    return Doubt(
        Refusal(
            f"all {members.server_count} servers are here already",
            "start the coordinator with a larger --servers",
        )
    )


def _worker(members: Membership, hello: Hello) -> Place:
    wrong = _wrong(members, hello)
    if wrong is not None:
        return wrong
    if members.sealed or members.ending or members.job not in (None, hello.job):
        return _closed_to(members, hello)
    if hello.rank is None:
        free = set(range(members.size)) - members.workers.keys()
        return min(free) if free else _full(members)
    holder = members.workers.get(hello.rank)
    if holder is None:
        return hello.rank
    return _taken(holder) if holder.closed is None else None


def _wrong(members: Membership, hello: Hello) -> Refusal | None:
    size = members.size
    if hello.world is not None and hello.world != size:
        return Refusal(
            f"this process was told a world size of {hello.world}, "
            f"the coordinator expects {size} workers",
            f"start {size} processes, or the coordinator with --workers {hello.world}",
        )
    if hello.rank is not None and not 0 <= hello.rank < size:
        return Refusal(
            f"rank {hello.rank} is outside a world of {size} workers",
            f"ranks go from 0 to {size - 1}",
        )
    return None


def _closed_to(members: Membership, hello: Hello) -> Refusal | Doubt | None:
    """Why a worker cannot enter now; None if the job may be about to end."""
    alive = any(m.present and m.closed is None for m in members.workers.values())
    if members.ending or not alive:
        return None
    if hello.job != members.job:
        here = len(members.ranks(State.HERE, State.JOINED))
        return Doubt(
            Refusal(
                f"busy with job {members.job!r}, {here} of {members.size} workers",
                "wait for its end, or start another coordinator",
            )
        )
    holder = None if hello.rank is None else members.workers.get(hello.rank)
    if holder is None:
        return _full(members)
    if holder.state is State.LEFT:
        return Refusal(
            f"rank {holder.rank} has left job {members.job!r}, whose members are fixed",
            "start all ranks again",
        )
    return _taken(holder) if holder.closed is None else None


def _full(members: Membership) -> Doubt:
    text = f"all {members.size} workers of job {members.job!r} are here"
    return Doubt(Refusal(text, "check --workers"))


def _taken(holder: Member) -> Doubt:
    text = f"rank {holder.rank} is taken by pid {holder.hello.pid} on {holder.hello.host}"
    return Doubt(Refusal(text, "give every process its own RANK"))
