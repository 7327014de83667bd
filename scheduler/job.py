"""One running job: everything its workers ask for between the first plan and the end.

Rules: each handler answers a repeated request as it answered the first. What ends the job is left
in ``failure``, a new plan in ``proposal``; the core acts on both. When a rank joins or leaves,
everything that waited for it is looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gradsum.errors import GradsumError, MismatchError, UsageError
from gradsum.proto.control import (
    AtFence,
    Consumed,
    Failed,
    FenceAck,
    Gather,
    Go,
    Joined,
    PlanMessage,
    Register,
    Registered,
    Replan,
    ServerInfo,
    Waiting,
    WindowReport,
)
from gradsum.proto.limits import MAX_INT, MAX_SLICE
from gradsum.scheduler.adaptation import Adaptation
from gradsum.scheduler.answers import Answers
from gradsum.scheduler.fence import Change, Fences
from gradsum.scheduler.gather import Gathers, Joins, failed
from gradsum.scheduler.membership import Member, Membership, State, listing
from gradsum.scheduler.post import Post
from gradsum.scheduler.registry import Registry, Rejected, pages
from gradsum.scheduler.tuner import Setting
from gradsum.scheduler.uplink import START
from gradsum.scheduler.windows import Windows, worth_packing

MAX_FENCED: Final = 30_000
"""Table entries up to which a plan with all versions and a packing fits a control message."""


@dataclass(frozen=True, slots=True)
class Config:
    """What the coordinator was started with. Bytes and seconds; max_job_bytes 0 is no limit."""

    workers: int
    servers: int
    slice_bytes: int = START
    auto_slices: bool = False  # slices follow the links' measured rates
    tune: bool = False  # slices, windows and packing are searched for while the job runs
    learnt: Mapping[str, Setting] = field(default_factory=dict)  # by fingerprint: what to try first
    pack_bytes: int = 1 << 20
    deterministic: bool = False
    heartbeat: float = 0.5
    suspect: float = 2.0
    lease: float = 10.0
    start_timeout: float = 300.0
    stall_warning: float = 5.0
    max_tensors: int = 1_000_000
    max_job_bytes: int = 0
    waiting_every: float = 2.0
    resend: float = 1.0  # a plan that a server has not acknowledged goes out again
    end_grace: float = 5.0  # a failed job's workers have this long to go
    fence_limit: float = 30.0  # how long ranks that came to a fence wait for the others

    @property
    def reconnect(self) -> float:
        """Seconds in which a member whose connection closed may be back: one heartbeat shows it."""
        return self.heartbeat + 0.25


class Job:
    """State of the job whose first plan is ``plan``."""

    __slots__ = (
        "_answers", "_config", "_handlers", "_members", "_post",
        "adaptation", "failure", "fences", "gathers", "joins", "plan", "proposal", "registry",
        "windows",
    )  # fmt: skip

    def __init__(
        self, config: Config, plan: PlanMessage, members: Membership, post: Post, last_fence: int
    ) -> None:
        self.plan = plan
        self.failure: Failed | None = None
        self.proposal: PlanMessage | None = None
        self.registry = Registry(config.max_tensors, config.max_job_bytes)
        self.gathers = Gathers()
        self.joins = Joins()
        self.windows = Windows(self.registry.table)
        self.fences = Fences(last_fence)
        self.adaptation = Adaptation(
            config, plan, members, self.fences, self.registry.table, post
        )
        self._answers = Answers()
        self._config = config
        self._members = members
        self._post = post
        self._handlers: dict[type[Any], Callable[[Member, Any], None]] = {
            Register: self._register,
            Gather: self._gather,
            WindowReport: self._window,
            FenceAck: self._fence_ack,
            AtFence: self._at_fence,
            Consumed: self._consumed,
            Joined: self._joined,
        }

    @property
    def active(self) -> set[int]:
        """Ranks whose word is awaited: those at work, or once all have joined, all of these (what
        follows a join, such as handing out the last weights, is done by everybody again)."""
        return self.at_work or self._members.ranks(State.JOINED)

    @property
    def at_work(self) -> set[int]:
        """Ranks that push: neither joined nor gone."""
        return self._members.ranks(State.HERE)

    @property
    def left(self) -> set[int]:
        """Ranks that have left."""
        return self._members.ranks(State.LEFT)

    def handle(self, member: Member, message: Any) -> bool:
        """Take a worker's message; False if it is none that a job knows."""
        handler = self._handlers.get(type(message))
        if handler is None or not member.is_worker:
            return False
        handler(member, message)
        return True

    def fail(self, error: GradsumError) -> None:
        """The job is over for everybody; the first cause counts. Names a tensor in the text only:
        a tensor in ``Failed`` with req 0 would say that the rest goes on."""
        if self.failure is None:
            self.failure = failed(0, error)._replace(tensor="")

    def advance(self, now: float) -> None:
        """What time brings: warnings, the next fence, the end of one that all have reached."""
        for ranks, text in self.gathers.stalled(self.active, now, self._config.stall_warning):
            self._post.log("warning", text)
            for rank in ranks:
                self._post.worker(rank, Waiting(text))
        if self.failure or self.proposal:
            return
        consume = self.fences.aim(self.at_work, self.registry.table, self.plan.versions)
        if consume is not None:
            self._announce(consume)
        if self.fences.complete(self.at_work):
            self._propose()
        elif self.fences.overdue(now, self._config.fence_limit):
            awaited = listing(self.fences.awaited(self.at_work))
            self._give_up(f"rank {awaited} did not pass it in {self._config.fence_limit:g} s")
        elif self.at_work and len(self.registry.table) <= MAX_FENCED:
            workers = [self._members.workers[rank] for rank in sorted(self.at_work)]
            self.adaptation.advance(self.plan, workers, now)
            fence = self.fences.open(self.plan.epoch)
            if fence is not None:
                self._announce(fence)

    def adopt(self, plan: PlanMessage) -> None:
        """All servers have the proposed plan: it is the plan now, GO tells the workers."""
        self.plan = plan
        self.adaptation.adopted(plan)
        self.proposal = None
        self.fences.close()
        self._post.workers(Go(plan.fence, plan))

    def departed(self, rank: int) -> None:
        """A rank is gone: its turn never comes."""
        self._give_up(f"rank {rank} has left")
        self._settle()

    def remind(self, rank: int, step: int) -> None:
        """At a heartbeat of a rank at ``step``: the fence, or its end, that it may have missed."""
        fence, over = self.fences.unheard(rank, step), self.fences.given_up
        if fence is not None and rank in self.at_work:
            self._post.worker(rank, fence)
        elif over is not None and step == over.step:
            self._post.worker(rank, Go(over.number, self.plan))

    def replan(self, asker: bytes, message: Replan) -> Registered | Failed:
        """Change slicing or packing at the next fence, for anybody who asks."""
        known: Registered | Failed | None = self._answers.get(asker, message.req)
        if known is not None:
            return known
        answer: Registered | Failed = Registered(message.req, ())
        if not (0 <= message.slice_bytes <= MAX_SLICE and 0 <= message.pack_bytes <= MAX_INT):
            text = f"slice_bytes={message.slice_bytes}, pack_bytes={message.pack_bytes}"
            hint = f"slice_bytes: 1 to {MAX_SLICE}, 0 keeps; pack_bytes: 0 keeps"
            answer = failed(message.req, UsageError(text, hint=hint))
        elif len(self.registry.table) > MAX_FENCED:
            text = f"{len(self.registry.table)} tensors, too many for a planned epoch"
            hint = f"a fence carries up to {MAX_FENCED} tensors"
            answer = failed(message.req, UsageError(text, hint=hint))
        else:
            self.fences.request(Change(message.slice_bytes or None, message.pack_bytes or None))
        self._answers.keep(asker, message.req, answer)
        return answer

    def _register(self, member: Member, message: Register) -> None:
        known = self._answers.get(member.token, message.req)
        if known is not None:
            self._post.worker(member.rank, known)
            return
        result = self.registry.register(member.rank, message.group, message.specs, message.last)
        if isinstance(result, Rejected):
            answer: Registered | Failed = failed(message.req, result.error)
            for rank in result.others:
                self._post.worker(rank, failed(0, result.error))
        else:
            for page in pages(self.registry.table, result.start):
                self._post.servers(page)
                self._post.workers(page)
            answer = Registered(message.req, result.keys)
        self._post.worker(member.rank, self._answers.keep(member.token, message.req, answer))
        self._settle_groups()

    def _gather(self, member: Member, message: Gather) -> None:
        for rank, letter in self.gathers.add(member.rank, message, self.active, self.left):
            self._post.worker(rank, letter)

    def _window(self, member: Member, message: WindowReport) -> None:
        if not self.windows.knows(message):
            self._post.junk(member.peer, f"window report of rank {member.rank} with unknown keys")
            return
        done = self.windows.add(member.rank, message)
        if done is not None:
            self._post.worker(member.rank, done)
        self._settle_windows()

    def _fence_ack(self, member: Member, message: FenceAck) -> None:
        fence = self.fences.ack(member.rank, message)
        if fence is not None:
            self._announce(fence)

    def _at_fence(self, member: Member, message: AtFence) -> None:
        missed = self.fences.arrive(member.rank, message)
        if missed is not None:
            self._post.worker(member.rank, missed)

    def _consumed(self, member: Member, message: Consumed) -> None:
        self.fences.consumed(member.rank, message)

    def _joined(self, member: Member, message: Joined) -> None:
        if member.state is State.HERE:
            member.state = State.JOINED
            self._post.log("info", f"rank {member.rank} has no more data")
        self.joins.add(member.rank, message.req)
        self._settle()

    def _announce(self, message: Any) -> None:
        for rank in sorted(self.at_work):
            self._post.worker(rank, message)

    def _settle(self) -> None:
        for rank, letter in self.gathers.settle(self.active, self.left):
            self._post.worker(rank, letter)
        for rank, answer in self.joins.settle(self.at_work):
            self._post.worker(rank, answer)
        self._settle_groups()
        self._settle_windows()

    def _settle_groups(self) -> None:
        error = self.registry.compare(self.active)
        if error is not None:
            self.fail(error)

    def _settle_windows(self) -> None:
        for result in self.windows.settle(self.active):
            if isinstance(result, MismatchError):
                self.fail(result)
                return
            self._post.workers(result)
            if self._packing(self.plan.pack_bytes) and len(self.registry.table) <= MAX_FENCED:
                self.fences.request(Change())

    def _packing(self, pack_bytes: int) -> tuple[int, ...]:
        order = self.windows.order
        return order if worth_packing(self.registry.table, order, pack_bytes) else ()

    def _give_up(self, cause: str) -> None:
        """Let everybody pass the open fence with the plan as it is."""
        number = self.fences.abort()
        self.adaptation.given_up()
        if number:
            self._post.log("warning", f"fence {number} given up: {cause}")
            self._post.workers(Go(number, self.plan))

    def _propose(self) -> None:
        """Build the next epoch's plan, whose clocks start at what all ranks have consumed."""
        fence = self.fences.current
        if fence is None:
            return
        change = self.fences.change
        pack_bytes = self.plan.pack_bytes if change.pack_bytes is None else change.pack_bytes
        self.proposal = self.plan._replace(
            slice_bytes=change.slice_bytes or self.plan.slice_bytes,
            pack_bytes=pack_bytes,
            window=self.plan.window if change.window is None else change.window,
            packing=self._packing(pack_bytes),
            packed=len(self.registry.table),
            servers=_weighted(self.plan.servers, change.weights),
            fence=fence.number,
            step=fence.step,
            versions=tuple(self.fences.target.items()),
        )
        self.fences.commit()


def _weighted(
    servers: tuple[ServerInfo, ...], weights: tuple[float, ...] | None
) -> tuple[ServerInfo, ...]:
    if weights is None:
        return servers
    return tuple(
        server._replace(weight=weight) for server, weight in zip(servers, weights, strict=True)
    )
