"""A cast of members for the coordinator's tests: events in, actions out, a clock that tests set."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

from gradsum.proto.control import (
    AtFence,
    Consume,
    Consumed,
    Fence,
    FenceAck,
    Go,
    Heartbeat,
    Hello,
    PlanAck,
    PlanMessage,
    Register,
    Registered,
    Welcome,
)
from gradsum.proto.limits import PROTOCOL
from gradsum.scheduler.core import CoordinatorCore
from gradsum.scheduler.events import (
    Action,
    Disconnected,
    Event,
    JobOver,
    Junk,
    Log,
    Received,
    Send,
    Tick,
)
from gradsum.scheduler.job import Config
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import Table, TensorSpec

M = TypeVar("M")


def spec(
    name: str, *shape: int, dtype: str = "float32", pack: str = "", first: int = 1
) -> TensorSpec:
    """A tensor."""
    return TensorSpec(name, dtype, dtype, shape, Policy(pack=pack), first)


def digest(*specs: TensorSpec) -> bytes:
    """The hash of a table of these tensors."""
    table = Table()
    for item in specs:
        table.append(item)
    return table.digest


def hello(role: str = "worker", rank: int | None = None, **changes: Any) -> Hello:
    """A Hello; pids differ by role and rank."""
    pid = (100 if role == "worker" else 200) + (rank or 0)
    data = f"tcp://127.0.0.1:{5000 + pid}" if role == "server" else ""
    base = Hello(
        PROTOCOL, role, "job" if role == "worker" else "", rank if role == "worker" else None,
        None, "host", pid, 0, data, data and data + "1", b"",
    )  # fmt: skip
    return base._replace(**changes)


class Cast:
    """A core, its clock, and what each peer has been sent. Peers: b"w0", b"w1", ..., b"s0", ..."""

    def __init__(self, workers: int = 2, servers: int = 1, **config: Any) -> None:
        self.config = Config(workers=workers, servers=servers, **config)
        counter = itertools.count()
        self.core = CoordinatorCore(self.config, "c0ffee", lambda: b"token%011d" % next(counter))
        self.now = 100.0
        self.inbox: dict[bytes, list[Any]] = {}
        self.actions: list[Action] = []
        self.tokens: dict[bytes, bytes] = {}

    def step(self, event: Event) -> list[Action]:
        """Hand an event over and sort what comes out."""
        actions = self.core.step(event, self.now)
        self.actions += actions
        for action in actions:
            if isinstance(action, Send):
                self.inbox.setdefault(action.peer, []).append(action.message)
                if isinstance(action.message, Welcome):
                    self.tokens[action.peer] = action.message.token
        return actions

    def send(self, peer: bytes, *messages: Any) -> None:
        """Messages from a peer."""
        for message in messages:
            self.step(Received(peer, message))

    def close(self, peer: bytes) -> None:
        """The peer's connection closes."""
        self.step(Disconnected(peer))

    def wait(self, seconds: float, beat: tuple[bytes, ...] = ()) -> None:
        """Let time pass: ticks when they are due, heartbeats of the peers in ``beat``."""
        end = self.now + seconds
        next_beat = self.now
        while True:
            due = self.core.next_deadline()
            moment = min(end, end if due is None else due, next_beat if beat else end)
            self.now = max(self.now, moment)
            if beat and self.now >= next_beat:
                next_beat += self.config.heartbeat
                for peer in beat:
                    self.beat(peer)
            due = self.core.next_deadline()
            if due is not None and self.now >= due:
                self.step(Tick())
            if self.now >= end:
                return

    def beat(self, peer: bytes, step: int = 0, epoch: int = 1) -> None:
        """A heartbeat of a member."""
        self.send(peer, Heartbeat(self.tokens.get(peer, b"?"), step, epoch, 0, b"", 0.0, {}))

    def got(self, peer: bytes, kind: type[M]) -> list[M]:
        """The messages of one kind that a peer has been sent since the last ``clear``."""
        return [m for m in self.inbox.get(peer, []) if isinstance(m, kind)]

    def last(self, peer: bytes, kind: type[M]) -> M:
        """The last message of a kind."""
        found = self.got(peer, kind)
        assert found, f"{peer!r} got no {kind.__name__}: {self.inbox.get(peer)}"
        return found[-1]

    def clear(self) -> None:
        """Forget what was sent."""
        self.inbox.clear()
        self.actions.clear()

    def logs(self, level: str = "") -> list[str]:
        """Log lines, of one level or all."""
        return [a.text for a in self.actions if isinstance(a, Log) and level in ("", a.level)]

    def junk(self) -> list[Junk]:
        """What was ignored."""
        return [a for a in self.actions if isinstance(a, Junk)]

    def over(self) -> list[bool]:
        """For each job that ended: whether it failed."""
        return [a.failed for a in self.actions if isinstance(a, JobOver)]

    @property
    def worker_peers(self) -> list[bytes]:
        """b"w0", b"w1", ..."""
        return [b"w%d" % rank for rank in range(self.config.workers)]

    @property
    def server_peers(self) -> list[bytes]:
        """b"s0", b"s1", ..."""
        return [b"s%d" % index for index in range(self.config.servers)]

    def gather_members(self) -> None:
        """Everybody says hello."""
        for index, peer in enumerate(self.server_peers):
            self.send(peer, hello("server", index))
        for rank, peer in enumerate(self.worker_peers):
            self.send(peer, hello("worker", rank))

    def start(self) -> None:
        """Bring a job to run, and forget what was said meanwhile."""
        self.gather_members()
        self.acknowledge()
        assert self.last(b"w0", PlanMessage).members
        self.clear()

    def pass_fence(self, step: int) -> PlanMessage:
        """All workers, now at ``step``, go to the fence that was announced last, for key 0; the
        plan with which they go on."""
        fence = self.last(b"w0", Fence)
        for peer in self.worker_peers:
            assert self.last(peer, Fence) == fence
            self.send(peer, FenceAck(fence.number, True, step))
            self.send(peer, AtFence(fence.number, {0: fence.step}))
        for peer in self.worker_peers:
            assert self.got(peer, Consume)
            self.send(peer, Consumed(fence.number))
        self.acknowledge()
        gos = [self.last(peer, Go) for peer in self.worker_peers]
        assert all(go == gos[0] for go in gos)
        return gos[0].plan

    def acknowledge(self) -> None:
        """All servers acknowledge the plan that they were sent last."""
        for peer in self.server_peers:
            self.send(peer, PlanAck(self.last(peer, PlanMessage).epoch))

    def register(
        self, peer: bytes, req: int, *specs: TensorSpec, group: str = ""
    ) -> tuple[int, ...]:
        """Register and return the keys."""
        self.send(peer, Register(req, group, specs))
        answer = self.last(peer, Registered)
        assert answer.req == req
        return answer.keys
