"""The sending side of a simulated member: the real queue, under the bound that its link gives.

A slice has its bytes once at a worker's machine; at a server's, which may stand for fewer or more
machines, as many times as there are workers for each of them (see cluster.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from gradsum.scheduler.credit import FRAME_COST, Grant
from gradsum.scheduler.queue import TransferQueue
from gradsum.scheduler.simulator.clock import Clock
from gradsum.scheduler.simulator.hands import Hands
from gradsum.scheduler.simulator.job import Job, Piece
from gradsum.scheduler.simulator.network import Machine, Network
from gradsum.scheduler.uplink import Uplink


class Receiver(Protocol):
    """Whoever slices are sent to."""

    machine: Machine

    def arrive(self, sender: int, piece: Piece, offset: int, seq: int) -> None:
        """A slice of the sender's has come over the link."""


class _Lane(NamedTuple):
    receiver: Receiver
    out: float
    into: float


class Outlet:
    """Of one member, whose number receivers know it by."""

    __slots__ = ("_clock", "_job", "_lanes", "_machine", "_network", "_number", "_queue", "_uplink",
                 "hands")  # fmt: skip

    def __init__(
        self, number: int, clock: Clock, network: Network, machine: Machine, job: Job, cost: float,
        queue: TransferQueue[Piece],
    ) -> None:  # fmt: skip
        """cost: seconds of the hands for each frame."""
        self.hands = Hands(clock, cost, self._depart)
        self._number = number
        self._clock = clock
        self._network = network
        self._machine = machine
        self._job = job
        self._queue = queue
        self._uplink = Uplink()
        self._lanes: dict[int, _Lane] = {}

    def open(self, lane: int, receiver: Receiver, *, out: float = 1.0, into: float = 1.0) -> None:
        """A receiver, whose first window is free. out, into: how often the bytes of a slice are at
        our machine, and at the receiver's."""
        self._lanes[lane] = _Lane(receiver, out, into)
        self._queue.open(lane, 1, self._job.window)

    def push(self, lane: int, piece: Piece, priority: int) -> None:
        """Queue a slice."""
        self._queue.push(lane, priority, piece.slice.length + FRAME_COST, piece)

    def take(self, lane: int, piece: Piece, event: Callable[[], None]) -> None:
        """A slice has come from the member of a lane: handle it when the hands are free."""
        self.hands.take(self._job.frames(piece, self._lanes[lane].out), event)

    def heard(self, lane: int, grant: Grant | None, seq: int = 0) -> None:
        """A receiver lets us go on; seq: of a frame that it has, 0 if it does not say."""
        before = self._queue.arrived
        if seq:
            self._queue.received(lane, seq)
        if grant is not None:
            self._queue.grant(lane, *grant)
        self._uplink.arrived(self._queue.arrived - before, self._queue.under_way, self._clock.now)
        self._queue.bound = self._job.schedule.bound(self._uplink.bound, self._job.slice_bytes)
        self.hands.pump()

    def _depart(self) -> float:
        departure = self._queue.pop()
        if departure is None:
            return 0
        self._uplink.departed(self._clock.now)
        receiver, out, into = self._lanes[departure.lane]
        piece, offset, seq = departure.item, departure.offset, departure.seq
        nbytes = piece.slice.length + FRAME_COST
        self._network.send(
            self._machine, receiver.machine, nbytes * out, nbytes * into,
            lambda: receiver.arrive(self._number, piece, offset, seq),
        )  # fmt: skip
        return self._job.frames(piece, out)
