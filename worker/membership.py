"""Membership: the worker's side of the conversation with the coordinator. No I/O.

Messages and calls of the session go in; messages to send, and news for the core and the session
come out of ``outbox`` and ``news``. Every request is repeated until it is answered, and the
heartbeat's answer tells what has been missed, so any message may be lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradsum import errors
from gradsum.errors import GradsumError, PeerLost, Refused, Unreachable
from gradsum.proto import control
from gradsum.proto.control import PlanMessage
from gradsum.scheduler.table import TensorSpec, parse_spec
from gradsum.worker.handle import Ticket

LEAVE = control.Leave("shutdown")
REPEAT = 1.0
"""Seconds until an unanswered request is sent again."""


@dataclass(frozen=True, slots=True)
class PlanNews:
    """A plan to adopt; fence: the number of the fence that GO opened, or 0."""

    message: PlanMessage
    fence: int


@dataclass(frozen=True, slots=True)
class TableNews:
    """Entries of the table."""

    start: int
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class FenceNews:
    """A fence was announced."""

    fence: control.Fence


@dataclass(frozen=True, slots=True)
class TargetNews:
    """All are at the fence: what to consume before GO."""

    consume: control.Consume


@dataclass(frozen=True, slots=True)
class LeftNews:
    """These ranks have left the job."""

    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class FailureNews:
    """The job failed, or with a tensor name only operations on that tensor."""

    error: GradsumError
    tensor: str


@dataclass(frozen=True, slots=True)
class FiringsNews:
    """Merged hook firings of an optimizer's parameters (V4)."""

    group: str
    counts: dict[int, int]


@dataclass(frozen=True, slots=True)
class WaitingNews:
    """The coordinator waits for members."""

    text: str


@dataclass(slots=True)
class _Request:
    message: Any
    ticket: Ticket
    due: float


def error_of(message: control.Failed) -> GradsumError:
    """The error that a Failed message stands for."""
    kind = getattr(errors, message.kind, GradsumError)
    if not (isinstance(kind, type) and issubclass(kind, GradsumError)):
        kind = GradsumError
    return kind(
        message.message, peer=message.peer or None, tensor=message.tensor or None,
        hint=message.hint or None,
    )  # fmt: skip


@dataclass(slots=True)
class Membership:
    """hello: what this process says of itself; connect: seconds until the first answer is due."""

    hello: control.Hello
    address: str
    connect: float
    welcome: control.Welcome | None = None
    outbox: list[Any] = field(default_factory=list)
    news: list[Any] = field(default_factory=list)
    epoch: int = 0
    left: frozenset[int] = frozenset()
    gone: bool = False
    unreachable: bool = False
    ended: bool = False
    _leaving: bool = False
    _requests: dict[int, _Request] = field(default_factory=dict)
    _next_request: int = 1
    _heard: float = 0.0
    _began: float = 0.0
    _next_beat: float = 0.0
    _plan_due: float = float("inf")

    def start(self, now: float) -> None:
        """Say hello."""
        self._began = self._heard = now
        self._next_beat = now + min(REPEAT, self.connect)
        self.outbox.append(self.hello)

    def ask(self, message: Any, ticket: Ticket, now: float) -> None:
        """Send a request whose first field is ``req``; the ticket gets the answer."""
        message = message._replace(req=self._next_request)
        self._next_request += 1
        self._requests[message.req] = _Request(message, ticket, now + REPEAT)
        self.outbox.append(message)

    def leave(self, now: float) -> None:
        """Say goodbye, again with each heartbeat until ``gone``: a lost one looks like a death."""
        self._leaving = True
        self.outbox.append(LEAVE)

    def next_deadline(self) -> float:
        """When tick is due; never again once the job has ended here."""
        if self.ended:
            return float("inf")
        due = min((request.due for request in self._requests.values()), default=float("inf"))
        return min(due, self._next_beat, self._plan_due)

    def tick(self, now: float, step: int, table: int, digest: bytes, idle: float,
             info: dict[str, Any]) -> None:  # fmt: skip
        """Repeat what is unanswered, beat, and give up on a coordinator that is silent."""
        if self.ended:
            return
        for request in self._requests.values():
            if now >= request.due:
                request.due = now + REPEAT
                self.outbox.append(request.message)
        if now >= self._plan_due:
            self._plan_due = now + REPEAT
            self.outbox.append(control.FetchPlan(table))
        if now < self._next_beat:
            return
        if self.welcome is None:
            if now - self._heard >= self.connect:
                self._unreachable(now)
                return
            self.outbox.append(self.hello)
            self._next_beat = min(now + REPEAT, self._heard + self.connect)
            return
        self._next_beat = now + self.welcome.heartbeat
        if self._leaving and not self.gone:
            self.outbox.append(LEAVE)
        self.outbox.append(
            control.Heartbeat(self.welcome.token, step, self.epoch, table, digest, idle, info)
        )
        if now - self._heard > self.welcome.lease:
            self._unreachable(now)

    def _unreachable(self, now: float) -> None:
        self.unreachable = True
        seconds = now - self._heard
        if self._heard == self._began:
            text = f"the coordinator at {self.address} does not answer ({seconds:.0f} s)"
        else:
            text = f"the coordinator at {self.address} has been silent for {seconds:.1f} s"
        self._fail(
            Unreachable(
                text, peer=self.address,
                hint="is it running there? gradsum status --coordinator " + self.address,
            )
        )  # fmt: skip

    def _fail(self, error: GradsumError, tensor: str = "") -> None:
        if not tensor:
            self.ended = True
            requests, self._requests = self._requests, {}
            for request in requests.values():
                request.ticket.reject(error)
        self.news.append(FailureNews(error, tensor))

    def fetch(self, table: int, now: float) -> None:
        """Ask for the plan and the table from ``table`` on, at most once a second."""
        if self._plan_due == float("inf"):
            self.outbox.append(control.FetchPlan(table))
            self._plan_due = now + REPEAT

    def received(self, message: Any, table: int, fence: int, now: float) -> None:
        """A message of the coordinator; ``table`` and ``fence``: how far this worker is."""
        self._heard = now
        match message:
            case control.Welcome():
                self._welcomed(message, now)
            case control.Refusal():
                self._fail(Refused(message.message, peer=self.address, hint=message.hint))
            case control.Waiting():
                self.news.append(WaitingNews(message.text))
            case control.PlanMessage():
                self._plan(message, message.fence)
            case control.Go():
                self._plan(message.plan, message.number)
            case control.Fence():
                self.news.append(FenceNews(message))
            case control.Consume():
                self.news.append(TargetNews(message))
            case control.TableMessage():
                specs = tuple(map(parse_spec, message.specs))
                self.news.append(TableNews(message.start, specs))
            case control.Firings():
                self.news.append(FiringsNews(message.group, message.counts))
            case control.HeartbeatReply():
                self._level(message, table, fence, now)
            case control.Left():
                self._departed(frozenset({message.rank}))
            case control.Failed() if message.req == 0:
                self._fail(error_of(message), message.tensor)
            case control.Failed() | control.Registered() | control.Gathered():
                self._answered(message)

    def _welcomed(self, message: control.Welcome, now: float) -> None:
        if self.welcome is not None and self.welcome.coordinator != message.coordinator:
            self._fail(
                PeerLost(
                    f"another coordinator ({message.coordinator}) answers at {self.address}",
                    peer=self.address, hint="start the job again",
                )
            )  # fmt: skip
            return
        if self.welcome is None:
            self._next_beat = now + message.heartbeat
        self.welcome = message
        self.hello = self.hello._replace(token=message.token, rank=message.rank)

    def _plan(self, message: PlanMessage, fence: int) -> None:
        """A process accepts plans of one coordinator id only (E9)."""
        self._plan_due = float("inf")
        if self.welcome is None or message.coordinator != self.welcome.coordinator:
            return
        self.epoch = max(self.epoch, message.epoch)
        self.news.append(PlanNews(message, fence))

    def _level(
        self, reply: control.HeartbeatReply, table: int, fence: int, now: float
    ) -> None:
        self._departed(frozenset(reply.left))
        if reply.epoch > self.epoch or reply.table > table or reply.fence > fence:
            self.fetch(table, now)

    def _departed(self, ranks: frozenset[int]) -> None:
        if self.welcome is not None and self.welcome.rank in ranks:
            self.gone = True
        fresh = ranks - self.left
        if fresh:
            self.left |= fresh
            self.news.append(LeftNews(self.left))

    def _answered(self, message: Any) -> None:
        request = self._requests.pop(message.req, None)
        if request is None:
            return
        if isinstance(message, control.Failed):
            request.ticket.reject(error_of(message))
        elif isinstance(message, control.Registered):
            request.ticket.resolve(list(message.keys))
        else:
            request.ticket.resolve(message.values)
