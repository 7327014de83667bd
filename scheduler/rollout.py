"""Bringing a plan into force: servers first, then the workers (I4).

Rules: a plan goes to all servers, with the workers' tokens, and again until each has acknowledged
its epoch; only then do workers hear of it. Epochs increase over all jobs of a coordinator, so that
a server which missed the end of a job never takes the next job's plan for an old one.
"""

from __future__ import annotations

from gradsum.proto.control import PlanMessage, ServerInfo
from gradsum.scheduler.job import Config
from gradsum.scheduler.membership import Membership
from gradsum.scheduler.placement import weights
from gradsum.scheduler.post import Post
from gradsum.scheduler.uplink import LOCAL


def first_plan(config: Config, coordinator: str, members: Membership) -> PlanMessage:
    """The plan of a job that begins: nothing registered, nothing packed; its epoch is still 0."""
    workers = [member for _, member in sorted(members.workers.items())]
    servers = [member for _, member in sorted(members.servers.items())]
    shares = weights([m.hello.host for m in workers], [m.hello.host for m in servers])
    return PlanMessage(
        coordinator=coordinator,
        job=members.job or "",
        epoch=0,
        members=tuple((m.rank, m.incarnation) for m in workers),
        servers=tuple(
            ServerInfo(m.rank, m.incarnation, m.hello.data, m.hello.control, share)
            for m, share in zip(servers, shares, strict=True)
        ),
        slice_bytes=LOCAL if config.auto_slices and members.together else config.slice_bytes,
        pack_bytes=config.pack_bytes,
        packing=(),
        packed=0,
        fence=0,
        step=0,
        versions=(),
        deterministic=config.deterministic,
        tokens=(),
    )


class Rollout:
    """The plan that servers are being told, if any."""

    __slots__ = ("_acked", "_epoch", "_members", "_post", "_repeat", "_resend", "pending")

    def __init__(self, members: Membership, post: Post, resend: float) -> None:
        self.pending: PlanMessage | None = None
        self._members = members
        self._post = post
        self._resend = resend
        self._acked: set[int] = set()
        self._epoch = 0
        self._repeat = 0.0

    def start(self, plan: PlanMessage, now: float) -> None:
        """Give the plan the next epoch and tell the servers."""
        self._epoch += 1
        self.pending = plan._replace(epoch=self._epoch)
        self._acked.clear()
        self.send(now)

    def send(self, now: float) -> None:
        """Tell the servers that have not acknowledged."""
        self._repeat = now + self._resend
        if self.pending is not None:
            self._post.servers(self.with_tokens(self.pending), but=self._acked)

    def repeat(self, now: float) -> None:
        """The same, when the last time is long enough ago."""
        if self.pending is not None and now >= self._repeat:
            self.send(now)

    def with_tokens(self, plan: PlanMessage) -> PlanMessage:
        """The copy for servers, which check the workers' tokens (I2)."""
        tokens = ((rank, m.token) for rank, m in sorted(self._members.workers.items()))
        return plan._replace(tokens=tuple(tokens))

    def ack(self, server: int, epoch: int) -> PlanMessage | None:
        """Take an acknowledgement; returns the plan when it was the last one awaited."""
        plan = self.pending
        if plan is None or epoch != plan.epoch:
            return None
        self._acked.add(server)
        if not self._acked >= self._members.servers.keys():
            return None
        self.pending = None
        return plan

    def drop(self) -> None:
        """The plan will not come: a member of it is gone."""
        self.pending = None
