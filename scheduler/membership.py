"""Who takes part: Hello, identity, reconnects, silence, leaving.

Rules: identity is role, rank, incarnation and token, bound at Hello; a routing id is only where to
send (I2). Incarnations increase for ever. The first worker's job id opens a job; until the plan
is out (``sealed``) places may be freed and taken again, afterwards membership is fixed. A Hello
that cannot be decided yet, as the place's holder may be dead or the last job is ending, waits.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gradsum.proto.control import Hello, Refusal
from gradsum.proto.limits import PROTOCOL

WORKER = "worker"
SERVER = "server"


class State(enum.Enum):
    """Where a member stands."""

    HERE = "here"
    JOINED = "joined"  # has no more data (E7); still a member
    LEFT = "left"
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """One process that said Hello. For a server ``rank`` is its index."""

    hello: Hello
    rank: int
    incarnation: int
    token: bytes
    peer: bytes
    heard: float
    state: State = State.HERE
    closed: float | None = None  # since when its connection is closed
    suspected: bool = False
    step: int = 0
    epoch: int = 0
    table: int = 0
    idle: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def is_worker(self) -> bool:
        """A worker, not a server."""
        return self.hello.role == WORKER

    @property
    def present(self) -> bool:
        """Neither left nor lost."""
        return self.state in (State.HERE, State.JOINED)

    @property
    def name(self) -> str:
        """As errors name it in ``peer``."""
        return f"{self.hello.role} {self.rank}"

    @property
    def title(self) -> str:
        """Name with host, process and, for a server, its address."""
        where = f"{self.hello.host}:pid {self.hello.pid}"
        if self.is_worker:
            return f"worker rank {self.rank} ({where})"
        return f"server {self.rank} ({where}, {self.hello.data})"


def listing(numbers: Iterable[int]) -> str:
    """``0-2, 5`` for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class Membership:
    """Members of the coordinator's one job, and the servers that stay from job to job."""

    __slots__ = (
        "_incarnation", "_peers", "_tokens", "_make_token",
        "ending", "job", "sealed", "server_count", "servers", "size", "workers",
    )  # fmt: skip

    def __init__(self, workers: int, servers: int, make_token: Callable[[], bytes]) -> None:
        self.size = workers
        self.server_count = servers
        self.job: str | None = None
        self.sealed = False
        self.ending = False
        self.workers: dict[int, Member] = {}
        self.servers: dict[int, Member] = {}
        self._make_token = make_token
        self._incarnation = 0
        self._peers: dict[bytes, Member] = {}
        self._tokens: dict[bytes, Member] = {}

    def by_peer(self, peer: bytes) -> Member | None:
        """The member that is bound to a routing id."""
        return self._peers.get(peer)

    def everyone(self) -> Iterator[Member]:
        """All present members, workers first."""
        for group in (self.workers, self.servers):
            yield from [member for member in group.values() if member.present]

    def ranks(self, *states: State) -> set[int]:
        """Ranks of the workers in these states."""
        return {rank for rank, member in self.workers.items() if member.state in states}

    @property
    def complete(self) -> bool:
        """All places are taken by members whose connection is open."""
        full = len(self.workers) == self.size and len(self.servers) == self.server_count
        return full and all(member.closed is None for member in self.everyone())

    def rebind(self, token: bytes, peer: bytes, now: float) -> Member | None:
        """Bind the holder of a token to a new routing id: it has reconnected."""
        member = self._tokens.get(token) if token else None
        if member is None or not member.present:
            return None
        self._peers.pop(member.peer, None)
        self._peers[peer] = member
        member.peer, member.heard, member.closed = peer, now, None
        return member

    def admit(self, peer: bytes, hello: Hello, now: float) -> Member | Refusal | None:
        """The member for a Hello (the same one for a repeated Hello), why not, or None: later."""
        if hello.protocol != PROTOCOL:
            return Refusal(
                f"protocol version {hello.protocol} meets version {PROTOCOL} of the coordinator",
                "install the same release of gradsum everywhere",
            )
        known = self._known(peer, hello)
        if known is not None:
            return self.rebind(known.token, peer, now)
        if hello.role == SERVER:
            place = self._server_place()
        elif hello.role == WORKER:
            place = self._worker_place(hello)
        else:
            return Refusal(f"unknown role {hello.role[:40]!r}", "roles are worker and server")
        if not isinstance(place, int):
            return place
        return self._enter(place, peer, hello, now)

    def _known(self, peer: bytes, hello: Hello) -> Member | None:
        """The member that says Hello again: same connection, token, or a lost Welcome's process."""
        member = self._peers.get(peer) or self._tokens.get(hello.token)
        if member is not None:
            return member if member.present and member.hello.role == hello.role else None
        for member in self.everyone():
            old = member.hello
            same = (old.role, old.host, old.pid, old.job, old.rank, old.data) == (
                hello.role, hello.host, hello.pid, hello.job, hello.rank, hello.data,
            )  # fmt: skip
            if same and member.closed is not None:
                return member
        return None

    def _enter(self, place: int, peer: bytes, hello: Hello, now: float) -> Member:
        self._incarnation += 1
        member = Member(hello, place, self._incarnation, self._make_token(), peer, now)
        if member.is_worker:
            self.job = hello.job
            self.workers[place] = member
        else:
            self.servers[place] = member
        self._peers[peer] = self._tokens[member.token] = member
        return member

    def _server_place(self) -> int | Refusal | None:
        free = set(range(self.server_count)) - self.servers.keys()
        if free:
            return None if self.sealed else min(free)
        if any(server.closed is not None for server in self.servers.values()):
            return None
        return Refusal(
            f"all {self.server_count} servers are here already",
            "start the coordinator with a larger --servers",
        )

    def _worker_place(self, hello: Hello) -> int | Refusal | None:
        wrong = self._wrong(hello)
        if wrong is not None:
            return wrong
        if self.job is not None and (self.sealed or self.ending or hello.job != self.job):
            return self._closed_to(hello)
        free = set(range(self.size)) - self.workers.keys()
        if hello.rank is None:
            return min(free) if free else self._full()
        holder = self.workers.get(hello.rank)
        if holder is None:
            return hello.rank
        return self._taken(holder) if holder.closed is None else None

    def _wrong(self, hello: Hello) -> Refusal | None:
        if hello.world is not None and hello.world != self.size:
            return Refusal(
                f"this process was told a world size of {hello.world}, "
                f"the coordinator expects {self.size} workers",
                f"start {self.size} processes, or the coordinator with --workers {hello.world}",
            )
        if hello.rank is not None and not 0 <= hello.rank < self.size:
            return Refusal(
                f"rank {hello.rank} is outside a world of {self.size} workers",
                f"ranks go from 0 to {self.size - 1}",
            )
        return None

    def _closed_to(self, hello: Hello) -> Refusal | None:
        """Why a worker cannot enter now; None if the job may be about to end."""
        alive = any(m.present and m.closed is None for m in self.workers.values())
        if self.ending or not alive:
            return None
        if hello.job != self.job:
            here = len(self.ranks(State.HERE, State.JOINED))
            return Refusal(
                f"busy with job {self.job!r}, {here} of {self.size} workers",
                "wait for its end, or start another coordinator",
            )
        holder = None if hello.rank is None else self.workers.get(hello.rank)
        if holder is None:
            return self._full()
        if holder.state is State.LEFT:
            return Refusal(
                f"rank {holder.rank} has left job {self.job!r}, whose members are fixed",
                "start all ranks again",
            )
        return self._taken(holder) if holder.closed is None else None

    def _full(self) -> Refusal:
        return Refusal(f"all {self.size} workers of job {self.job!r} are here", "check --workers")

    @staticmethod
    def _taken(holder: Member) -> Refusal:
        return Refusal(
            f"rank {holder.rank} is taken by pid {holder.hello.pid} on {holder.hello.host}",
            "give every process its own RANK, or none",
        )

    def close(self, peer: bytes, now: float) -> Member | None:
        """The connection is closed; returns the present member that it belonged to."""
        member = self._peers.get(peer)
        if member is None or not member.present:
            return None
        if member.closed is None:
            member.closed = now
        return member

    def depart(self, member: Member, state: State) -> None:
        """A member has left or is lost. Its place is free, unless it is a sealed job's worker."""
        member.state = state
        self._tokens.pop(member.token, None)
        if member.is_worker and self.sealed:
            return
        group = self.workers if member.is_worker else self.servers
        if group.get(member.rank) is member:
            del group[member.rank]
        if member.is_worker:
            self._peers.pop(member.peer, None)
            if not self.workers and not self.ending:
                self.job = None

    def reset(self) -> dict[bytes, int]:
        """Forget the job and its workers; returns routing id and rank of those who had gone."""
        gone = {member.peer: rank for rank, member in self.workers.items() if not member.present}
        for member in self.workers.values():
            self._peers.pop(member.peer, None)
            self._tokens.pop(member.token, None)
        self.workers = {}
        self.job, self.sealed, self.ending = None, False, False
        return gone

    def missing(self) -> str:
        """``1 of 2 servers and for worker rank 1; here: ...``: who is awaited and who is here."""
        parts = []
        servers = self.server_count - len(self.servers)
        if servers:
            parts.append(f"{servers} of {self.server_count} servers")
        ranks = set(range(self.size)) - self.workers.keys()
        if ranks:
            parts.append(f"worker rank{'s' if len(ranks) > 1 else ''} {listing(ranks)}")
        closed = [member.title for member in self.everyone() if member.closed is not None]
        parts += [f"{title} to reconnect" for title in closed[:5]]
        return f"{' and for '.join(parts) or 'nobody'}; here: {self._here()}"

    def _here(self) -> str:
        shown = [
            f"{rank} ({member.hello.host} pid {member.hello.pid})"
            for rank, member in sorted(self.workers.items())[:8]
        ]
        more = len(self.workers) - len(shown)
        ranks = ", ".join(shown) + (f" and {more} more" if more else "")
        workers = f"worker rank{'s' if len(self.workers) > 1 else ''} {ranks}" if shown else ""
        servers = f"servers {listing(self.servers)}" if self.servers else ""
        return ", ".join(filter(None, (workers, servers))) or "nobody"
