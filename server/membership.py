"""Membership: the server's side of the conversation with the coordinator. No I/O.

Messages come in, messages to send go to ``outbox`` and what they mean for the engine to ``events``.
A server of one job (``once``) ends when the coordinator is gone; a standing one says hello again
and waits for the next, without end by design. Nothing is served before a plan names this
incarnation (I4), and plans are taken of the coordinator that gave the welcome only (E9).
"""

from __future__ import annotations

from typing import Any, Final

from gradsum.errors import Refused, Unreachable
from gradsum.proto import control
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.table import parse_spec
from gradsum.server.events import Adopt, Event, Extend, Reset

HELLO_REPEAT: Final = 1.0
FETCH_REPEAT: Final = 0.2


class Membership:
    """hello: what this server says of itself; connect: seconds until the first answer is due."""

    __slots__ = ("_address", "_connect", "_fetch_due", "_heard", "_next_beat", "_once", "events",
                 "hello", "notes", "outbox", "over", "welcome")  # fmt: skip

    def __init__(
        self, hello: control.Hello, address: str, connect: float, once: bool, now: float
    ) -> None:
        self.hello = hello
        self.welcome: control.Welcome | None = None
        self.outbox: list[Any] = [hello]
        self.events: list[Event] = []
        self.notes: list[str] = []
        self.over: control.JobEnd | None = None
        self._address = address
        self._connect = connect
        self._once = once
        self._heard = now
        self._next_beat = now + HELLO_REPEAT
        self._fetch_due = now

    def next_deadline(self) -> float:
        """When tick is due."""
        return self._next_beat

    def fetch(self, table: int, now: float) -> None:
        """Ask for the plan and the table from ``table`` on, not too often."""
        if now >= self._fetch_due:
            self._fetch_due = now + FETCH_REPEAT
            self.outbox.append(control.FetchPlan(table))

    def tick(self, now: float, epoch: int, table: int, digest: bytes, info: dict[str, Any]) -> None:
        """Say hello, or beat. Raises Unreachable when that ends this server."""
        if now < self._next_beat:
            return
        silent = now - self._heard
        if self.welcome is None:
            self._next_beat = now + HELLO_REPEAT
            self.outbox.append(self.hello)
            if silent > self._connect:
                raise self._gone(f"does not answer ({silent:.0f} s)")
            return
        self._next_beat = now + self.welcome.heartbeat
        self.outbox.append(
            control.Heartbeat(self.welcome.token, 0, epoch, table, digest, 0.0, info)
        )
        if silent > self.welcome.lease:
            gone = self._gone(f"has been silent for {silent:.1f} s")
            if self._once:
                raise gone
            self.notes.append(f"{gone.message}; waiting for it to come back")
            self._forget()

    def _gone(self, how: str) -> Unreachable:
        return Unreachable(
            f"the coordinator at {self._address} {how}", peer=self._address,
            hint="is it running there? gradsum coordinator --bind HOST:PORT",
        )  # fmt: skip

    def _forget(self) -> None:
        self.welcome = None
        self.hello = self.hello._replace(token=b"")
        self._heard = float("inf")
        self.events.append(Reset())

    def received(self, message: Any, epoch: int, table: int, now: float) -> None:
        """A message of the coordinator; epoch and table: how far the engine is.

        Raises Refused when this server is not wanted.
        """
        self._heard = now
        match message:
            case control.Welcome():
                self._welcomed(message)
            case control.Refusal() if self.welcome is None:
                raise Refused(message.message, hint=message.hint)
            case control.Refusal():
                self._forget()
            case control.PlanMessage():
                self._adopt(message)
            case control.TableMessage():
                specs = tuple(map(parse_spec, message.specs))
                self.events.append(Extend(message.start, specs))
            case control.HeartbeatReply():
                if (epoch and message.epoch > epoch) or message.table > table:
                    self.fetch(table, now)
            case control.JobEnd():
                self.over = message
                self.events.append(Reset())
                self.notes.append(
                    f"job {message.job!r} {'failed' if message.failed else 'ended'}"
                )
            case control.Waiting():
                self.notes.append(message.text)

    def _welcomed(self, message: control.Welcome) -> None:
        if self.welcome is None:
            self.notes.append(f"server {message.rank} ready on {self.hello.data}")
        self.welcome = message
        self.hello = self.hello._replace(token=message.token)

    def _adopt(self, message: control.PlanMessage) -> None:
        welcome = self.welcome
        if welcome is None or message.coordinator != welcome.coordinator:
            return
        for place, info in enumerate(message.servers):
            if (info.number, info.incarnation) == (welcome.rank, welcome.incarnation):
                self.events.append(Adopt(Plan.of(message), place))
                self.outbox.append(control.PlanAck(message.epoch))
