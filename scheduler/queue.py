"""TransferQueue: the one place where outgoing bytes wait, on workers and servers alike.

The most urgent slice whose destination has credit goes next; lower numbers are more urgent, ties go
by arrival (ByteScheduler section 4, generalised to many destinations). Rules:

* Credit is granted by the receiver in absolute offsets of this connection (F1): a frame may leave
  while the bytes sent are below ``hold``. It may then exceed it by one frame, so a slice larger
  than the window still travels.
* A slice more urgent than everything in flight obeys only ``limit`` (F1).
* A lane whose numbers have not moved for STALLED seconds, since frames or grants were lost, sends
  one frame beyond the grant, or it would wait for ever (F3): ``overdue``.
* Over all lanes about ``bound`` bytes are under way, so that an urgent slice waits for little
  (DESIGN 6). Each lane has its share of them, by the bytes that it will carry: with equal parts,
  lanes of servers that carry less would be done long before the others. A lane may always have one
  frame under way, and as much as its receiver may keep to itself before it says that it has it.
* What nobody wants any more when its turn comes is dropped and never counted.
* Offsets count every byte handed to the connection, lost or not, and start anew with a generation.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

STALLED: Final = 1.0
PATIENCE: Final = 8.0
"""Seconds without a departure or news of the receiver after which a lane tries one frame (F3); they
double up to PATIENCE until the receiver has seen more, since the link may only be slow."""


class Departure(NamedTuple, Generic[T]):
    """A frame that may leave now, with the numbers its header carries."""

    lane: int
    item: T
    offset: int
    seq: int
    generation: int


class Lane(Generic[T]):
    """What waits for one destination, and how far the destination lets us go."""

    __slots__ = ("arrived", "generation", "heap", "hold", "inflight", "limit", "mark", "patience",
                 "seen", "sent", "seq", "share", "since")  # fmt: skip

    def __init__(self, generation: int, window: int) -> None:
        self.heap: list[tuple[int, int, int, T]] = []
        self.share = 1.0
        self.restart(generation, window)

    def restart(self, generation: int, window: int) -> None:
        """Begin a new connection: nothing is in flight, the first window is free."""
        self.generation = generation
        self.sent = 0
        self.seen = 0  # by grants
        self.arrived = 0  # by grants and receipts
        self.seq = 0
        self.hold = window
        self.limit = window
        self.inflight: deque[tuple[int, int, int]] = deque()
        self.mark = (0, 0)
        self.since = 0.0
        self.patience = STALLED

    def ready(self) -> bool:
        """Whether the head of this lane may leave."""
        if not self.heap:
            return False
        if self.sent < self.hold:
            return True
        if self.sent >= self.limit:
            return False
        urgency = self.heap[0][0]
        return all(urgency < other for _, other, _ in self.inflight)

    def depart(self, priority: int, nbytes: int) -> tuple[int, int]:
        """Count a frame as sent; its end offset and sequence number."""
        self.sent += nbytes
        self.seq += 1
        self.inflight.append((self.sent, priority, self.seq))
        return self.sent, self.seq

    def stalled(self, now: float) -> bool:
        """Whether this open lane has things to send and nothing has moved for too long."""
        mark = (self.sent, self.seen)
        if self.seen > self.mark[1]:
            self.patience = STALLED
        if not self.heap or not self.generation or self.ready() or mark != self.mark:
            self.mark, self.since = mark, now
            return False
        return now - self.since >= self.patience


class TransferQueue(Generic[T]):
    """Slices of all destinations, by urgency and credit."""

    __slots__ = ("_count", "_lanes", "_quiet", "_urgent", "_wanted", "bound")

    def __init__(
        self, wanted: Callable[[int, T], bool], quiet: int = 0, *, urgent: bool = True
    ) -> None:
        """wanted(lane, item): whether an item whose turn has come is still to be sent. quiet:
        receivers report arrivals when these fill this part of their window; 0: each frame.
        urgent: False leaves urgency out, so that items leave in the order of arrival."""
        self._wanted = wanted
        self._quiet = quiet
        self._urgent = urgent
        self._lanes: dict[int, Lane[T]] = {}
        self._count = 0
        self.bound: int | None = None

    def open(self, lane: int, generation: int, window: int) -> None:
        """A connection to ``lane`` exists; what waits for it stays, what was in flight is gone."""
        known = self._lanes.get(lane)
        if known is None:
            self._lanes[lane] = Lane(generation, window)
        else:
            known.restart(generation, window)

    def expect(self, lane: int) -> None:
        """Items may wait for ``lane`` from now on; nothing leaves before it is open."""
        self._lanes.setdefault(lane, Lane(0, 0))

    def share(self, lane: int, part: float) -> None:
        """How much a lane carries of all bytes, relative to the others."""
        self._lanes[lane].share = part

    def push(self, lane: int, priority: int, nbytes: int, item: T) -> None:
        """Queue an item of ``nbytes``; the lane must be open."""
        self._count += 1
        urgency = priority if self._urgent else 0
        heapq.heappush(self._lanes[lane].heap, (urgency, self._count, nbytes, item))

    def grant(self, lane: int, generation: int, seen: int, hold: int, limit: int) -> None:
        """The receiver has seen ``seen`` bytes and lets us go on to hold / limit.

        Grants of an older generation, or older than what is known, are void. Holds may shrink at
        any time; limits only with progress, when the window is another one.
        """
        found = self._lanes.get(lane)
        if found is None or found.generation != generation or seen < found.seen:
            return
        if seen == found.seen and limit < found.limit and hold <= found.hold:
            return
        found.limit = limit if seen > found.seen else max(limit, found.limit)
        found.seen = seen
        found.hold = min(hold, found.limit)
        found.arrived = max(found.arrived, seen)
        while found.inflight and found.inflight[0][0] <= seen:
            found.inflight.popleft()

    def received(self, lane: int, seq: int) -> None:
        """The receiver has frame ``seq`` of this connection, and all before it."""
        inflight = self._lanes[lane].inflight
        while inflight and inflight[0][2] <= seq:
            self._lanes[lane].arrived = inflight.popleft()[0]

    def pop(self) -> Departure[T] | None:
        """The most urgent item that may leave, or None."""
        best: tuple[int, int] | None = None
        chosen = -1
        part = self._part()
        for number, lane in self._lanes.items():
            self._tidy(number, lane)
            least = (lane.limit - lane.seen) / self._quiet if self._quiet else 1
            if lane.sent - lane.arrived >= max(least, part * lane.share):
                continue
            if lane.ready() and (best is None or lane.heap[0][:2] < best):
                best = lane.heap[0][:2]
                chosen = number
        return None if best is None else self._leave(chosen)

    def _part(self) -> float:
        """Bytes under way that a lane may have, for each unit of its share."""
        if self.bound is None:
            return float("inf")
        busy = (lane.share for lane in self._lanes.values() if lane.heap or lane.inflight)
        return self.bound / max(sum(busy), 1e-9)

    def overdue(self, now: float) -> list[Departure[T]]:
        """One item beyond the grant of each lane that has stalled; call at least each heartbeat."""
        departures = []
        for number, lane in self._lanes.items():
            self._tidy(number, lane)
            if lane.stalled(now):
                lane.patience = min(2 * lane.patience, PATIENCE)
                departures.append(self._leave(number))
        return departures

    def _tidy(self, number: int, lane: Lane[T]) -> None:
        while lane.heap and not self._wanted(number, lane.heap[0][3]):
            heapq.heappop(lane.heap)

    def _leave(self, number: int) -> Departure[T]:
        lane = self._lanes[number]
        priority, _, nbytes, item = heapq.heappop(lane.heap)
        offset, seq = lane.depart(priority, nbytes)
        return Departure(number, item, offset, seq, lane.generation)

    def __contains__(self, lane: int) -> bool:
        return lane in self._lanes

    def generation(self, lane: int) -> int:
        """Of the connection to ``lane``, 0 before the first."""
        return self._lanes[lane].generation

    def seen(self, lane: int) -> int:
        """Bytes of this connection that the receiver has reported as arrived."""
        return self._lanes[lane].seen

    @property
    def under_way(self) -> int:
        """Bytes that have left and that no receiver has reported as arrived."""
        return sum(lane.sent - lane.arrived for lane in self._lanes.values())

    @property
    def arrived(self) -> int:
        """Bytes that receivers have reported as arrived, on their present connections."""
        return sum(lane.arrived for lane in self._lanes.values())

    def clear(self) -> None:
        """Forget everything that waits; connections and what is in flight stay as they are."""
        for lane in self._lanes.values():
            lane.heap.clear()

    def waiting(self, lane: int) -> int:
        """Items that wait for a lane."""
        return len(self._lanes[lane].heap) if lane in self._lanes else 0
