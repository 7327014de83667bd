"""What a job asks fences for by itself: slices and shares that fit the links, the tuner's next try.

Rules: everything becomes a planned epoch, one at a time, and nothing is asked for while another is
on its way. Links count once all ranks pass fence points and have measured their own; shares of
servers, once every machine's has been measured. Once the tuner has begun, it alone changes slices.
Shares move only when the slowest link would gain GAIN by what was measured, and has been so for
LASTING: the rest is noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gradsum.proto.control import PlanMessage
from gradsum.scheduler.events import Learnt
from gradsum.scheduler.fence import Change, Fences
from gradsum.scheduler.membership import Member, Membership
from gradsum.scheduler.placement import slowest, weights
from gradsum.scheduler.post import Post
from gradsum.scheduler.record import fingerprint
from gradsum.scheduler.table import Table
from gradsum.scheduler.tuning import Tuning
from gradsum.scheduler.uplink import slices_for

if TYPE_CHECKING:
    from gradsum.scheduler.job import Config

GAIN: Final = 1.2
LASTING: Final = 5.0
REST: Final = 10.0
"""Seconds from one move of shares to the next: what was measured before it must fade."""


class Adaptation:
    """Of one job."""

    __slots__ = ("_config", "_fences", "_members", "_moved", "_post", "_since", "_table",
                 "tuning")  # fmt: skip

    def __init__(
        self, config: Config, plan: PlanMessage, members: Membership, fences: Fences, table: Table,
        post: Post,
    ) -> None:  # fmt: skip
        self.tuning = Tuning(config.learnt, plan) if config.tune else None
        self._config = config
        self._members = members
        self._fences = fences
        self._table = table
        self._post = post
        self._moved = float("-inf")
        self._since: float | None = None

    def advance(self, plan: PlanMessage, workers: list[Member], now: float) -> None:
        """Ask for what is worth a fence now; workers: those at work."""
        if self.tuning is None or not self.tuning.begun:
            self._reslice(plan, workers)
        if now >= self._moved + REST:
            self._move(plan, workers, now)
        if self.tuning is not None:
            self._tune(self.tuning, plan, workers, now)

    def adopted(self, plan: PlanMessage) -> None:
        """A new plan is in force."""
        if self.tuning is not None:
            self.tuning.adopted(plan)

    def given_up(self) -> None:
        """The open fence was given up."""
        if self.tuning is not None and self._fences.given_up is not None:
            self.tuning.given_up(self._fences.given_up.step)

    def _measured(self, workers: list[Member]) -> bool:
        """Whether links matter, and all workers pass fence points and have measured theirs."""
        return not self._members.one_host and all(w.step and w.uplink for w in workers)

    def _reslice(self, plan: PlanMessage, workers: list[Member]) -> None:
        if not self._config.auto_slices or self._fences.busy or not self._measured(workers):
            return
        rates = [worker.uplink for worker in workers]
        size = slices_for(rates, plan.slice_bytes)
        if size is not None:
            self._post.log("info", f"slices of {size} bytes fit links of {min(rates):.3g} B/s")
            self._fences.request(Change(slice_bytes=size))

    def _move(self, plan: PlanMessage, workers: list[Member], now: float) -> None:
        """Ask for shares by the capacity of the links."""
        servers = [self._members.servers[server.number] for server in plan.servers]
        if self._fences.busy or not self._measured(workers):
            return
        rates: dict[str, float] = {}
        for member in (*workers, *servers):
            rates[member.hello.host] = max(rates.get(member.hello.host, 0.0), member.capacity)
        if not all(rates.values()):
            return
        homes = [worker.hello.host for worker in workers]
        hosts = [server.hello.host for server in servers]
        wanted = weights(homes, hosts, rates)
        given = tuple(server.weight for server in plan.servers)
        before, after = (slowest(homes, hosts, rates, each) for each in (given, wanted))
        if before <= GAIN * after:
            self._since = None
            return
        if self._since is None:
            self._since = now
        if now >= self._since + LASTING:
            shown = ", ".join(f"{host} {rate:.3g}" for host, rate in sorted(rates.items())[:8])
            self._post.log("info", f"shares by the links, B/s: {shown}; the slowest carries for "
                           f"{after / before:.0%} of the time")  # fmt: skip
            self._moved, self._since = now, None
            self._fences.request(Change(weights=wanted))

    def _tune(
        self, tuning: Tuning, plan: PlanMessage, workers: list[Member], now: float
    ) -> None:
        """Ask for what the tuner wants to try next; the rule for links comes first."""
        took = tuning.sample({w.rank: w.pace for w in workers}, busy=self._fences.busy)
        if took is None:
            return
        measured = self._members.one_host or all(worker.uplink for worker in workers)
        name = fingerprint(self._table.digest, len(workers), len(plan.servers))
        ready = measured or not self._config.auto_slices
        change = tuning.look(took, now, name, ready=ready)
        if change is not None:
            self._post.log("info", f"tuning: {change.slice_bytes} bytes a slice, {change.window} "
                           f"slices under way, {change.pack_bytes} bytes packed")  # fmt: skip
            self._fences.request(change)
        record = tuning.news(name)
        if record is not None:
            self._post.add(Learnt(record))
