"""Lookout: rounds that do not complete, and servers that are silent. No I/O.

Nothing waits for ever without a word: a warning names the oldest round and the ranks it lacks, and
a server that says nothing for the lease ends the job with its address.
"""

from __future__ import annotations

from gradsum.errors import Unreachable
from gradsum.scheduler.plan import Plan
from gradsum.worker.core import Core
from gradsum.worker.handle import lacking


class Lookout:
    """stall: seconds until and between warnings; silence: seconds until a server is given up."""

    __slots__ = ("_next", "_silence", "_stall")

    def __init__(self, stall: float, silence: float) -> None:
        self._stall = stall
        self._silence = silence
        self._next = 0.0

    def look(self, core: Core, plan: Plan, now: float) -> str:
        """A warning to log, "" for none. Raises Unreachable for a server that is silent."""
        for server, seconds, ever in core.links.silent(now, self._silence):
            address = plan.servers[server].data
            how = f"has been silent for {seconds:.1f} s" if ever else "cannot be reached"
            raise Unreachable(
                f"server {server} at {address} {how}", peer=f"server {server}",
                hint="is it running, and does its --advertise address lead to it from here?",
            )  # fmt: skip
        waiting = core.waiting()
        if not waiting or now < self._next or now - waiting[0].since < self._stall:
            return ""
        self._next = now + self._stall
        oldest = waiting[0]
        others = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        return (
            f"tensor {oldest.name!r} version {oldest.version}{others}: not complete after "
            f"{now - oldest.since:.0f} s, {lacking(oldest)}"
        )
