"""Links: the worker's view of its connection to each server. No I/O.

Each link has a generation (ours, new per connection), the credit we grant for sums, the pushes in
flight by sequence number, and the records that wait for the next envelope. Until the server says
Attached, Attach is repeated; heartbeats repeat the grant (F1).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from gradsum.proto import peer
from gradsum.scheduler.credit import Bounds, Inflow
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.uplink import START
from gradsum.worker.rounds import Flight, RoundTrip

BATCH: Final = 4096
"""Records in one envelope; more wait for the next one, or it would exceed its limit of bytes."""

FORGET: Final = 64
"""A transmission this far behind one that has its receipt will hardly have its own."""

REORDER: Final = 3
"""A push is lost when one sent this many later has its receipt (links are FIFO, but be careful)."""


class Link:
    """One server."""

    __slots__ = ("attach", "attached", "flights", "generation", "heard", "inflow", "next_ping",
                 "outbox", "rtt", "standing", "strange", "times")  # fmt: skip

    def __init__(self, now: float) -> None:
        self.attach = peer.Attach(b"", "", b"")
        self.generation = 0
        self.attached = False
        self.strange = False
        self.standing = False
        self.heard = now
        self.next_ping = float("inf")
        self.rtt = RoundTrip()
        self.inflow = Inflow(0, 1)
        self.flights: dict[int, Flight] = {}
        self.times: dict[int, float] = {}
        self.outbox: list[Any] = []


class Links:
    """All servers of the plan, by their place in it."""

    __slots__ = ("_attach", "_bounds", "_heartbeat", "_joined", "_links", "_more", "_window",
                 "plan")  # fmt: skip

    def __init__(self, attach: peer.Attach, bounds: Bounds, heartbeat: float) -> None:
        self._attach = attach
        self._bounds = bounds
        self._window = bounds.window(START)
        self._heartbeat = heartbeat
        self._links: dict[int, Link] = {}
        self._joined = False
        self._more = False
        self.plan: Plan | None = None

    def adopt(self, plan: Plan, now: float) -> None:
        """A new plan: pushes in flight of the old one are void; connections stay."""
        self.plan = plan
        self._window = self._bounds.window(plan.message.slice_bytes, plan.message.window)
        for server in range(len(plan.servers)):
            self._links.setdefault(server, Link(now))
        for link in self._links.values():
            link.inflow.window = self._window
            link.flights.clear()
            link.standing = False

    def connected(self, server: int, generation: int, local: bool, now: float) -> list[Flight]:
        """Sockets exist; returns the flights that the old connection has lost."""
        link = self._links.setdefault(server, Link(now))
        lost = list(link.flights.values())
        link.flights.clear()
        link.times.clear()
        link.generation = generation
        link.attached = False
        link.strange = False
        link.standing = False
        link.heard = now
        link.next_ping = now + self._heartbeat
        link.inflow = Inflow(generation, self._window)
        link.attach = self._attach if local else peer.Attach(self._attach.token, "", b"")
        link.outbox = [link.attach, peer.Credit(*link.inflow.grant())]
        return lost

    def generation(self, server: int) -> int:
        """Our current connection generation to a server."""
        return self._links[server].generation

    def attached(self, server: int, generation: int) -> bool:
        """The server has bound our connections; False if it is no news, or of an older one."""
        link = self._links[server]
        if generation != link.generation or link.attached:
            return False
        link.attached = True
        return True

    def strange(self, server: int) -> bool:
        """The server does not know us; True when that asks for a new connection."""
        link = self._links[server]
        if not link.attached or link.strange:
            return False
        link.strange = True
        return True

    def heard(self, server: int, now: float) -> None:
        """Anything arrived on the control connection."""
        self._links[server].heard = now

    def silent(self, now: float, limit: float) -> list[tuple[int, float, bool]]:
        """Servers not heard of for ``limit`` seconds: index, seconds, whether ever attached."""
        return [
            (server, now - link.heard, link.attached)
            for server, link in self._links.items()
            if now - link.heard > limit
        ]

    def tell(self, server: int, record: Any) -> None:
        """Queue a record for the next envelope."""
        self._links[server].outbox.append(record)

    def sent(self, server: int, seq: int, flight: Flight, now: float) -> None:
        """A push is on its way."""
        link = self._links[server]
        link.flights[seq] = flight
        link.times[seq] = now

    def settle(self, server: int, seq: int) -> None:
        """The fate of a push is known."""
        self._links[server].flights.pop(seq, None)

    def overtaken(self, server: int, seq: int) -> list[Flight]:
        """Pushes that must be lost, since a later one has its receipt (F3)."""
        flights = self._links[server].flights
        late: list[int] = []
        for number in flights:  # in order of sending
            if number + REORDER > seq:
                break
            late.append(number)
        return [flights.pop(number) for number in late]

    def measured(self, server: int, seq: int, now: float) -> None:
        """The receipt of transmission ``seq`` is here, be it the first of its push or a repeat."""
        link = self._links[server]
        sent = link.times.pop(seq, None)
        if sent is None:
            return
        link.rtt.sample(now - sent)
        while link.times and (oldest := next(iter(link.times))) + FORGET <= seq:
            del link.times[oldest]

    def timeout(self, server: int) -> float:
        """Seconds until a push is repeated."""
        return self._links[server].rtt.timeout

    def arrived(self, server: int, generation: int, offset: int, now: float) -> bool:
        """A sum frame came in; False when it belongs to an older connection."""
        inflow = self._links[server].inflow
        if inflow.generation != generation:
            return False
        inflow.arrived(offset, now)
        return True

    def join(self) -> None:
        """Repeat Standing until every server has seen it (E7)."""
        self._joined = True
        for link in self._links.values():
            if link.generation:
                link.next_ping = 0.0

    def standing_seen(self, server: int) -> None:
        """A server knows that we have joined."""
        self._links[server].standing = True

    def joined_everywhere(self) -> bool:
        """Whether every server knows that we have joined."""
        return self._joined and all(link.standing for link in self._links.values())

    def stale(self, now: float) -> Iterable[int]:
        """Servers that have not answered Attach for a heartbeat: attach again."""
        return [
            server
            for server, link in self._links.items()
            if link.generation and not link.attached and now >= link.next_ping
        ]

    def next_deadline(self) -> float:
        """When drain is due: the next heartbeat, or at once when records are left over."""
        if self._more:
            return 0.0
        return min((link.next_ping for link in self._links.values()), default=float("inf"))

    def drain(self, now: float) -> dict[int, list[Any]]:
        """Records per server, with grants that are news and heartbeats that are due."""
        out: dict[int, list[Any]] = {}
        self._more = False
        for server, link in self._links.items():
            if not link.generation:
                continue  # no sockets yet
            if now >= link.next_ping:
                self._beat(link, now)
            elif link.attached:
                grant = link.inflow.offer()
                if grant is not None:
                    link.outbox.append(peer.Credit(*grant))
            if link.outbox:
                out[server], link.outbox = link.outbox[:BATCH], link.outbox[BATCH:]
                self._more = self._more or bool(link.outbox)
        return out

    def _beat(self, link: Link, now: float) -> None:
        link.next_ping = now + self._heartbeat
        if not link.attached:
            link.outbox.insert(0, link.attach)  # first: it binds the connection
        link.inflow.told = link.inflow.grant()
        link.outbox += [peer.Ping(), peer.Credit(*link.inflow.told)]
        if self._joined and not link.standing:
            link.outbox.append(peer.Standing())
