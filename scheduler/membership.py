"""Who takes part: Hello, identity, reconnects, silence, leaving.

Rules: identity is role, rank, incarnation and token, bound at Hello; a routing id is only where to
send (I2). Incarnations increase for ever. The first worker's job id opens a job; until the plan
is out (``sealed``) places may be freed and taken again, afterwards membership is fixed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from gradsum.proto.codec import pack
from gradsum.proto.control import Heartbeat, Hello

WORKER = "worker"
SERVER = "server"
MAX_INFO: Final = 2048
"""Bytes of a member's counters."""


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

    def beat(self, message: Heartbeat) -> None:
        """Note what a heartbeat says, for the status."""
        self.step, self.epoch, self.table = message.step, message.epoch, message.table
        self.idle, self.info = message.idle, message.info if _small(message.info) else {}

    @property
    def uplink(self) -> float:
        """Bytes per second of its link as it has measured them, 0 while it has not."""
        return self._rate("uplink")

    @property
    def capacity(self) -> float:
        """The same at its best, when no receiver held it back."""
        return self._rate("capacity")

    def _rate(self, name: str) -> float:
        rate = self.info.get(name)
        return rate if isinstance(rate, float) and 0 < rate < math.inf else 0.0

    @property
    def pace(self) -> tuple[int, float] | None:
        """How many fence points it has passed, and by its own clock when it came to the last."""
        match self.info.get("passed"):
            case (int(step), float(at)) if step > 0 and math.isfinite(at):
                return step, at
        return None

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


def _small(info: dict[str, Any]) -> bool:
    """Whether counters can be passed on in a status with many members."""
    return _shallow(info, 4) and len(pack(info)) <= MAX_INFO


def _shallow(value: Any, levels: int) -> bool:
    """No deeper than ``levels``: what can be read can be too deep to be written again."""
    if isinstance(value, dict):
        return levels > 0 and all(_shallow(item, levels - 1) for item in value.values())
    return not isinstance(value, tuple) or (
        levels > 0 and all(_shallow(item, levels - 1) for item in value)
    )


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

    @property
    def together(self) -> bool:
        """Whether all share one host's memory."""
        homes = {member.hello.home for member in self.everyone()}
        return len(homes) == 1 and "" not in homes

    @property
    def one_host(self) -> bool:
        """Whether all are on one host, so that no link is between them."""
        return len({member.hello.host for member in self.everyone()}) == 1

    def rebind(self, token: bytes, peer: bytes, now: float) -> Member | None:
        """Bind the holder of a token to a new routing id: it has reconnected."""
        member = self._tokens.get(token) if token else None
        if member is None or not member.present:
            return None
        self._peers.pop(member.peer, None)
        self._peers[peer] = member
        member.peer, member.heard, member.closed = peer, now, None
        return member

    def known(self, peer: bytes, hello: Hello) -> Member | None:
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

    def enter(self, place: int, peer: bytes, hello: Hello, now: float) -> Member:
        """A new member in a free place."""
        self._incarnation += 1
        member = Member(hello, place, self._incarnation, self._make_token(), peer, now)
        if member.is_worker:
            self.job = hello.job
            self.workers[place] = member
        else:
            self.servers[place] = member
        self._peers[peer] = self._tokens[member.token] = member
        return member

    def close(self, peer: bytes, now: float) -> Member | None:
        """The connection is closed; returns the present member that it belonged to."""
        member = self._peers.get(peer)
        if member is None:
            return None
        if not member.present:
            del self._peers[peer]
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
