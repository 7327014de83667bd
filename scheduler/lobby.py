"""Those who wait: members until the job is complete, and processes that cannot be let in yet.

Rules: whoever waits is told at once and every two seconds for whom; the log says each change once.
The start has a deadline, counted from the job's first worker.
"""

from __future__ import annotations

from typing import Final

from gradsum.errors import StallTimeout
from gradsum.proto.control import Hello, Refusal, Waiting
from gradsum.scheduler.admission import Doubt, place_for
from gradsum.scheduler.job import Config
from gradsum.scheduler.membership import Member, Membership
from gradsum.scheduler.post import Post

MAX_LATER: Final = 4096


class Lobby:
    """Announcements before a job runs, and Hellos that are offered again later."""

    __slots__ = ("_config", "_deadline", "_last", "_later", "_members", "_post", "_repeat")

    def __init__(self, config: Config, members: Membership, post: Post) -> None:
        self._config = config
        self._members = members
        self._post = post
        self._later: dict[bytes, tuple[Hello, float]] = {}  # and since when they wait
        self._last = ""
        self._repeat = 0.0
        self._deadline = 0.0

    def open(self, now: float) -> None:
        """A job waits for its members from now on."""
        self._deadline = now + self._config.start_timeout
        self._repeat = now
        self._last = ""

    @property
    def text(self) -> str:
        """What is awaited and who is here."""
        return f"waiting for {self._members.missing()}"

    def announce(self, now: float) -> StallTimeout | None:
        """Tell everybody who is missing when it is time; the error when the deadline has passed."""
        if now >= self._deadline:
            limit = self._config.start_timeout
            return StallTimeout(
                f"the job did not start within {limit:g} s: {self.text}",
                hint="start what is missing, or raise start_timeout",
            )
        if now >= self._repeat:
            self._repeat = now + self._config.waiting_every
            self._post.workers(Waiting(self.text))
            self._post.servers(Waiting(self.text))
            if self.text != self._last:
                self._last = self.text
                self._post.log("info", self.text)
        return None

    def greet(self, member: Member, now: float) -> None:
        """Tell a newcomer, or everybody if it is time."""
        if now >= self._repeat:
            self.announce(now)
        else:
            self._post.peer(member.peer, Waiting(self.text))

    def receive(self, peer: bytes, hello: Hello, now: float) -> Member | None:
        """The member that says hello, for the first time or again; None if refused or put off."""
        member = self._members.known(peer, hello)
        if member is not None:
            return self._members.rebind(member.token, peer, now)
        place = place_for(self._members, hello)
        since = self._later[peer][1] if peer in self._later else now
        if isinstance(place, Doubt) and now - since >= self._config.reconnect:
            place = place.refusal
        if place is None or isinstance(place, Doubt):
            self._postpone(peer, hello, since, place)
            return None
        self.forget(peer)
        if isinstance(place, Refusal):
            who = f"{hello.role[:40]} ({hello.host[:200]}:pid {hello.pid})"
            self._post.log("warning", f"{who} refused: {place.message}", "refused")
            self._post.peer(peer, place)
            return None
        member = self._members.enter(place, peer, hello, now)
        self._post.log("info", f"{member.title} is here, incarnation {member.incarnation}")
        return member

    def _postpone(self, peer: bytes, hello: Hello, since: float, doubt: Doubt | None) -> None:
        """Keep a Hello that cannot be decided yet."""
        if peer not in self._later:
            if len(self._later) >= MAX_LATER:
                self._post.peer(peer, Refusal("too many processes wait for a job", "try later"))
                return
            text = f"job {self._members.job!r} is ending; waiting for the next one to begin"
            if doubt is not None:
                text = f"{doubt.refusal.message}; waiting to see whether that is still so"
            self._post.peer(peer, Waiting(text))
        self._later[peer] = (hello, since)

    def forget(self, peer: bytes) -> None:
        """This one waits no longer."""
        self._later.pop(peer, None)

    @property
    def later(self) -> list[tuple[bytes, Hello]]:
        """The Hellos to offer again."""
        return [(peer, hello) for peer, (hello, _) in self._later.items()]
