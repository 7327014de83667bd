"""The coordinator without its sockets: ``step(event, now) -> actions``.

A job goes idle -> waiting (first worker) -> planning (everybody is here, the servers have not all
acknowledged the plan) -> running -> failed, or over. Rules: what is announced is repeated by level:
Waiting every two seconds, plans until acknowledged, a failure at every heartbeat; for all else a
member that missed it asks. Membership is fixed while a job runs: a member that is lost ends it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final

from gradsum.errors import PeerLost, ProtocolError, Unreachable, UsageError
from gradsum.proto.control import (
    Abort,
    Failed,
    FetchPlan,
    Go,
    Heartbeat,
    HeartbeatReply,
    Hello,
    JobEnd,
    Leave,
    Left,
    PlanAck,
    PlanMessage,
    Refusal,
    Replan,
    StatusQuery,
    StatusReply,
    Welcome,
)
from gradsum.scheduler.events import Action, Disconnected, Event, JobOver, Received, Stop, Tick
from gradsum.scheduler.gather import failed
from gradsum.scheduler.job import Config, Job
from gradsum.scheduler.lobby import Lobby
from gradsum.scheduler.membership import Member, Membership, State
from gradsum.scheduler.post import Post
from gradsum.scheduler.registry import pages
from gradsum.scheduler.rollout import Rollout, first_plan
from gradsum.scheduler.status import describe

TICK: Final = 0.25
"""Seconds between two looks at silence and repeats."""

STRANGER: Final = Refusal("unknown member; say hello", "this process is no member, or no longer")


class Phase(enum.Enum):
    """Where the coordinator's one job stands."""

    IDLE = "idle"
    WAITING = "waiting"
    PLANNING = "planning"
    RUNNING = "running"
    FAILED = "failed"


class CoordinatorCore:
    """``coordinator`` is this process's id (E9), ``make_token`` gives 16 unguessable bytes."""

    __slots__ = (
        "_config", "_departed", "_end_by", "_failure", "_fence", "_handlers", "_id", "_job",
        "_lobby", "_members", "_next_tick", "_now", "_phase", "_post", "_rollout",
    )  # fmt: skip

    def __init__(self, config: Config, coordinator: str, make_token: Callable[[], bytes]) -> None:
        self._config = config
        self._id = coordinator
        self._members = Membership(config.workers, config.servers, make_token)
        self._post = Post(self._members)
        self._lobby = Lobby(config, self._members, self._post)
        self._rollout = Rollout(self._members, self._post, config.resend)
        self._phase = Phase.IDLE
        self._job: Job | None = None
        self._failure: Failed | None = None
        self._fence = 0  # highest fence number used, over all jobs
        self._departed: dict[bytes, int] = {}  # routing ids of the last job's workers that left
        self._now = 0.0
        self._end_by = 0.0  # when a failed job's workers must be gone
        self._next_tick: float | None = None
        self._handlers: dict[type[Any], Callable[[Member, Any], None]] = {
            Heartbeat: self._heartbeat,
            PlanAck: self._plan_ack,
            FetchPlan: self._fetch_plan,
            Leave: self._leave,
            Abort: self._abort,
        }

    @property
    def phase(self) -> Phase:
        """Where the job stands."""
        return self._phase

    def next_deadline(self) -> float | None:
        """When a Tick is due."""
        return self._next_tick

    def status(self) -> dict[str, Any]:
        """What ``gradsum status`` shows."""
        picture = {
            "coordinator": self._id,
            "state": self._phase.value,
            "failure": self._failure.message if self._failure else "",
        }
        return picture | describe(self._config, self._members, self._job, self._now)

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event; returns what is to be done, in order."""
        self._now = now
        match event:
            case Received(peer, message):
                self._received(peer, message)
            case Disconnected(peer):
                self._disconnected(peer)
            case Tick():
                self._tick()
            case Stop(reason):
                self._stop(reason)
        self._advance()
        busy = self._phase is not Phase.IDLE or self._members.servers or self._lobby.later
        if self._next_tick is None and busy:
            self._next_tick = now + TICK
        return self._post.take()

    # ---- events

    def _received(self, peer: bytes, message: Any) -> None:
        member = self._members.by_peer(peer)
        if isinstance(message, Hello):
            self._hello(peer, message)
        elif isinstance(message, StatusQuery):
            self._post.peer(peer, StatusReply(message.req, self.status()))
        elif isinstance(message, Replan):
            self._replan(member.token if member else peer, peer, message)
        elif member is None or not member.present:
            self._stranger(peer, member, message)
        else:
            member.heard, member.suspected = self._now, False
            self._from_member(member, message)

    def _from_member(self, member: Member, message: Any) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(member, message)
        elif self._job is None or not self._job.handle(member, message):
            self._post.junk(member.peer, f"{type(message).__name__} from {member.title}")

    def _stranger(self, peer: bytes, gone: Member | None, message: Any) -> None:
        """Not bound: a member after a reconnect it did not notice, one that has left, or nobody."""
        left = gone is not None and gone.state is State.LEFT
        if gone is not None and (left or isinstance(message, Leave | Abort)):
            self._post.peer(peer, Left(gone.rank))
        elif peer in self._departed:
            self._post.peer(peer, Left(self._departed[peer]))
        elif isinstance(message, Heartbeat):
            member = self._members.rebind(message.token, peer, self._now)
            if member is None:
                self._post.peer(peer, STRANGER)
            else:
                self._heartbeat(member, message)
                self._remind(member)
        else:
            self._post.junk(peer, f"{type(message).__name__} from a stranger")

    def _disconnected(self, peer: bytes) -> None:
        self._lobby.forget(peer)
        self._departed.pop(peer, None)
        member = self._members.close(peer, self._now)
        if member is None:
            return
        if self._phase is Phase.FAILED and member.is_worker:
            self._members.depart(member, State.LOST)
            return
        back = self._now + self._config.reconnect
        self._next_tick = back if self._next_tick is None else min(self._next_tick, back)

    def _tick(self) -> None:
        self._next_tick = None
        for member in self._members.everyone():
            self._check(member)
        self._rollout.repeat(self._now)
        if self._phase is Phase.WAITING:
            self._wait()
        elif self._phase is Phase.FAILED and self._now >= self._end_by:
            self._finish(failed=True)
        for peer, hello in self._lobby.later:
            self._hello(peer, hello)

    def _check(self, member: Member) -> None:
        """Evict a member whose connection stays closed or who is silent for the lease."""
        silent = self._now - member.heard
        if not member.present:  # the loss of another one has ended it
            return
        if member.closed is not None and self._now - member.closed >= self._config.reconnect:
            self._lose(member, "its connection closed")
        elif silent > self._config.lease:
            self._lose(member, f"not heard of for {silent:.1f} s")
        elif silent > self._config.suspect and not member.suspected:
            member.suspected = True
            self._post.log("warning", f"{member.title} not heard of for {silent:.1f} s")

    def _stop(self, reason: str) -> None:
        """End whatever runs: everybody is told, nobody is waited for."""
        hint = "start the coordinator and the job again"
        error = Unreachable(f"the coordinator was stopped by {reason}", hint=hint)
        self._post.workers(failed(0, error))
        for peer, _ in self._lobby.later:
            self._post.peer(peer, Refusal(error.message, hint))
            self._lobby.forget(peer)
        if self._phase is not Phase.IDLE:
            self._finish(failed=True)

    # ---- joining

    def _hello(self, peer: bytes, hello: Hello) -> None:
        """Open a job with its first worker, say who is awaited, or catch a member up."""
        member = self._lobby.receive(peer, hello, self._now)
        if member is None:
            return
        config, rank = self._config, member.rank
        born = (member.incarnation, member.token)
        welcome = Welcome(self._id, rank, config.workers, *born, config.heartbeat, config.lease)
        self._post.peer(member.peer, welcome)
        if self._phase not in (Phase.IDLE, Phase.WAITING):
            self._remind(member)
            return
        if member.is_worker and self._phase is Phase.IDLE:
            self._phase = Phase.WAITING
            self._departed.clear()
            self._lobby.open(self._now)
        if self._phase is Phase.WAITING and not self._members.complete:
            self._lobby.greet(member, self._now)

    def _remind(self, member: Member) -> None:
        """What a member may have missed while its connection was closed."""
        if self._failure is not None and member.is_worker:
            self._post.peer(member.peer, self._failure)
        else:
            self._fetch_plan(member, FetchPlan(0))

    def _wait(self) -> None:
        error = None if self._members.complete else self._lobby.announce(self._now)
        if error is not None:
            self._fail(failed(0, error))

    # ---- plans

    def _advance(self) -> None:
        """What follows from the state by itself, whatever the event was."""
        if self._phase is Phase.WAITING and self._members.complete:
            self._phase = Phase.PLANNING
            self._rollout.start(first_plan(self._config, self._id, self._members), self._now)
        job = self._job
        if job is not None and self._phase is Phase.RUNNING:
            job.advance(self._now)
            if job.failure is not None:
                self._fail(job.failure)
            elif job.proposal is not None and self._rollout.pending is None:
                self._rollout.start(job.proposal, self._now)
        ongoing = self._phase in (Phase.RUNNING, Phase.FAILED)
        if ongoing and not self._members.ranks(State.HERE, State.JOINED):
            self._finish(failed=self._phase is Phase.FAILED)

    def _plan_ack(self, member: Member, message: PlanAck) -> None:
        plan = None if member.is_worker else self._rollout.ack(member.rank, message.epoch)
        if plan is None:
            return
        self._post.log("info", f"job {plan.job!r}: epoch {plan.epoch} begins")
        if self._job is not None:
            self._job.adopt(plan)
            return
        self._job = Job(self._config, plan, self._members, self._post, self._fence)
        self._phase = Phase.RUNNING
        self._members.sealed = True
        self._post.workers(plan)

    def _fetch_plan(self, member: Member, message: FetchPlan) -> None:
        """The plan, the table from ``start`` on, and to workers the fence: open or over."""
        job, plan = self._job, self._current(member)
        if plan is not None:
            self._post.peer(member.peer, plan)
        if job is None:
            return
        for page in pages(job.registry.table, max(0, message.start)):
            self._post.peer(member.peer, page)
        if member.is_worker and job.fences.current is not None:
            self._post.peer(member.peer, job.fences.current)
        elif member.is_worker and job.fences.given_up is not None:
            self._post.peer(member.peer, Go(job.fences.given_up.number, job.plan))

    def _current(self, member: Member) -> PlanMessage | None:
        """The plan as this member should know it: servers hear of a new one first."""
        plan = self._job.plan if self._job else None
        if member.is_worker:
            return plan
        plan = self._rollout.pending or plan
        return self._rollout.with_tokens(plan) if plan else None

    def _replan(self, asker: bytes, peer: bytes, message: Replan) -> None:
        if self._job is None or self._phase is not Phase.RUNNING:
            error = UsageError("no job is running", hint="start one, then change its plan")
            self._post.peer(peer, failed(message.req, error))
        else:
            self._post.peer(peer, self._job.replan(asker, message))

    # ---- life and end

    def _heartbeat(self, member: Member, message: Heartbeat) -> None:
        if message.token != member.token:
            self._post.peer(member.peer, STRANGER)
            return
        member.beat(message)
        if self._failure is not None and member.is_worker:
            self._post.peer(member.peer, self._failure)
        job = self._job
        if job is None:
            self._post.peer(member.peer, HeartbeatReply(0, 0, 0, ()))
            return
        if job.registry.table.digest_at(message.table) not in (None, message.digest):
            error = ProtocolError(
                f"{member.name} holds another tensor table than the coordinator, "
                f"in its first {message.table} entries",
                peer=member.name, hint="are all parts of one release? start the job again",
            )  # fmt: skip
            self._fail(failed(0, error))
            return
        if member.is_worker:
            job.fences.seen(message.step)
            job.remind(member.rank, message.step)
        level = (job.plan.epoch, len(job.registry.table), job.fences.number)
        self._post.peer(member.peer, HeartbeatReply(*level, tuple(sorted(job.left))))

    def _leave(self, member: Member, message: Leave) -> None:
        self._post.peer(member.peer, Left(member.rank))
        if not member.is_worker and self._phase is Phase.RUNNING:
            self._lose(member, f"it left while the job ran ({message.reason[:200]})")
            return
        self._post.log("info", f"{member.title} leaves: {message.reason[:200]}")
        self._depart(member, State.LEFT)
        if member.is_worker and self._job is not None and self._phase is Phase.RUNNING:
            self._post.workers(Left(member.rank))
            self._job.departed(member.rank)

    def _abort(self, member: Member, message: Abort) -> None:
        self._post.peer(member.peer, Left(member.rank))
        self._lose(member, message.message[:2000] or "it raised an error")

    def _lose(self, member: Member, cause: str) -> None:
        """A member is gone without leave. Before the job runs this only frees its place."""
        text = f"{member.title} ended: {cause}"
        self._post.log("info" if self._phase is Phase.FAILED else "warning", text)
        self._depart(member, State.LOST)
        if self._phase is Phase.RUNNING:
            hint = "its own output says why; start the job again"
            self._fail(failed(0, PeerLost(text, peer=member.name, hint=hint)))

    def _depart(self, member: Member, state: State) -> None:
        self._members.depart(member, state)
        if self._phase is Phase.PLANNING:
            self._rollout.drop()
            self._phase = Phase.WAITING
            self._lobby.open(self._now)
        if self._phase is Phase.WAITING and not self._members.workers:
            self._phase = Phase.IDLE

    def _fail(self, failure: Failed) -> None:
        """The job has failed: its workers are told and have a few seconds to go."""
        self._phase = Phase.FAILED
        self._failure = failure
        self._rollout.drop()
        self._members.ending = True
        self._end_by = self._now + self._config.end_grace
        self._post.log("error", f"job {self._members.job!r} failed: {failure.message}")
        self._post.workers(failure)
        for member in self._members.everyone():
            if member.is_worker and member.closed is not None:
                self._members.depart(member, State.LOST)

    def _finish(self, *, failed: bool) -> None:
        """The job is over: servers drop its state, the next one may come."""
        name = self._members.job or ""
        self._post.servers(JobEnd(name, failed))
        self._post.log("info", f"job {name!r} is over: {'failed' if failed else 'done'}")
        self._fence = max(self._fence, self._job.fences.last if self._job else 0)
        self._departed = self._members.reset()
        self._rollout.drop()
        self._phase, self._job, self._failure = Phase.IDLE, None, None
        self._post.add(JobOver(failed))
        for peer, hello in self._lobby.later:
            self._hello(peer, hello)
