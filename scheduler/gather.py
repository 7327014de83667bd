"""Gather, barrier and join: one value from every rank, handed to all of them.

Rules: a gather is (tag, turn). It is complete when every rank that has not joined (E7) has sent; a
rank that left without sending fails it for all who wait. The last answer of a tag is kept, since
any rank may have missed it; a rank that sends turn t+1 has seen turn t.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from typing import Final

from gradsum.errors import GradsumError, PeerLost, ProtocolError
from gradsum.proto.control import Failed, Gather, Gathered
from gradsum.proto.limits import MAX_CONTROL, MAX_GATHER
from gradsum.scheduler.membership import listing

KEEP: Final = 64
"""Answers kept over all tags; each is at most one control message."""

Letters = list[tuple[int, Gathered | Failed]]


def failed(req: int, error: GradsumError) -> Failed:
    """The message that raises ``error`` at the other end."""
    return Failed(
        req,
        type(error).__name__,
        error.message,
        error.peer or "",
        error.tensor or "",
        error.hint or "",
    )


def who_left(left: Set[int], doing: str) -> PeerLost:
    """The error of an operation that ranks who left will never complete."""
    ranks = f"rank{'s' if len(left) > 1 else ''} {listing(left)}"
    return PeerLost(
        f"{ranks} {'have' if len(left) > 1 else 'has'} left the job; {doing} cannot complete",
        peer=f"worker {min(left)}",
        hint="call join() on ranks that run out of data first",
    )


class Gathers:
    """All gathers of a job. Answers are letters: (rank, message)."""

    __slots__ = ("_answers", "_done", "_due", "_open")

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], dict[int, Gather]] = {}
        self._due: dict[tuple[str, int], float] = {}  # when those who wait are told for whom
        self._done: dict[str, int] = {}
        self._answers: OrderedDict[tuple[str, int], dict[int, bytes]] = OrderedDict()

    def add(self, rank: int, message: Gather, needed: Set[int], left: Set[int]) -> Letters:
        """Take a rank's value; ``needed`` are the ranks that have neither left nor joined."""
        place = (message.tag, message.turn)
        if place in self._answers:
            return [(rank, Gathered(message.req, self._answers[place]))]
        if message.turn <= self._done.get(message.tag, -1):
            return []
        if len(message.value) > MAX_GATHER:
            text = f"value of {len(message.value)} bytes for {message.tag!r}, limit {MAX_GATHER}"
            hint = "broadcast large objects as tensors"
            return [(rank, failed(message.req, ProtocolError(text, hint=hint)))]
        self._open.setdefault(place, {})[rank] = message
        return self._settle(place, needed, left)

    def settle(self, needed: Set[int], left: Set[int]) -> Letters:
        """Answer what has become complete or hopeless because a rank left or joined."""
        letters: Letters = []
        for place in list(self._open):
            letters += self._settle(place, needed, left)
        return letters

    def stalled(self, needed: Set[int], now: float, every: float) -> list[tuple[list[int], str]]:
        """Gathers that have waited for ``every`` seconds, and again: who waits, and a text that
        says for whom. Asked at every event."""
        self._due = {place: self._due.get(place, now + every) for place in self._open}
        found = []
        for place, due in self._due.items():
            awaited = needed - self._open[place].keys()
            if now >= due and awaited:
                self._due[place] = now + every
                ranks = f"rank{'s' if len(awaited) > 1 else ''} {listing(awaited)}"
                found.append((sorted(self._open[place]), f"gather {place[0]!r} waits for {ranks}"))
        return found

    def waiting(self, needed: Set[int]) -> dict[str, list[int]]:
        """Open gathers and who is awaited, for the status."""
        return {tag: sorted(needed - sent.keys()) for (tag, _), sent in self._open.items()}

    def _settle(self, place: tuple[str, int], needed: Set[int], left: Set[int]) -> Letters:
        sent = self._open[place]
        if left - sent.keys():
            del self._open[place]
            lost = who_left(left - sent.keys(), f"gather {place[0]!r}")
            return [(rank, failed(gather.req, lost)) for rank, gather in sent.items()]
        if needed - sent.keys():
            return []
        del self._open[place]
        self._done[place[0]] = place[1]
        values = {rank: gather.value for rank, gather in sorted(sent.items())}
        if sum(map(len, values.values())) + 16 * len(values) > MAX_CONTROL - 1024:
            total = sum(map(len, values.values()))
            error = ProtocolError(
                f"gather {place[0]!r}: {total} bytes over all ranks, limit {MAX_CONTROL}",
                hint="send less from each rank",
            )
            return [(rank, failed(gather.req, error)) for rank, gather in sent.items()]
        self._keep(place, values)
        return [(rank, Gathered(gather.req, values)) for rank, gather in sent.items()]

    def _keep(self, place: tuple[str, int], values: dict[int, bytes]) -> None:
        self._answers.pop((place[0], place[1] - 1), None)
        self._answers[place] = values
        if len(self._answers) > KEEP:
            self._answers.popitem(last=False)


class Joins:
    """Ranks that have no more data, in the order of joining (E7)."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: dict[int, int] = {}

    def add(self, rank: int, req: int) -> None:
        """A rank joins; a repeated request keeps its place in the order."""
        self._requests[rank] = req

    def settle(self, needed: Set[int]) -> list[tuple[int, Gathered]]:
        """The answer to all, naming the last to join, once nobody else is at work."""
        if needed or not self._requests:
            return []
        last = {list(self._requests)[-1]: b"last"}
        return [(rank, Gathered(req, last)) for rank, req in self._requests.items()]
