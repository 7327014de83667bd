"""A simulated server: slices come in, sums go out when all copies are in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gradsum.scheduler.credit import ACTIVE, NEWS, Grant, Inflow, Skew
from gradsum.scheduler.queue import TransferQueue
from gradsum.scheduler.simulator.clock import Clock
from gradsum.scheduler.simulator.job import Job, Piece
from gradsum.scheduler.simulator.network import Machine, Network
from gradsum.scheduler.simulator.outlet import Outlet
from gradsum.scheduler.simulator.replica import Replica


class Shard:
    """Adds slices; grants credit on receipt, held to the slowest active sender (F1, F2)."""

    def __init__(
        self, number: int, clock: Clock, network: Network, machine: Machine, job: Job, cost: float,
        replicas: Sequence[Replica],
    ) -> None:  # fmt: skip
        """cost: seconds of the hands for each frame."""
        self.number = number
        self.machine = machine
        self._clock = clock
        self._network = network
        self._job = job
        self._replicas = replicas
        queue = TransferQueue[Piece](lambda *_: True, NEWS, urgent=job.schedule.urgent_replies)
        self.outlet = Outlet(number, clock, network, machine, job, cost, queue)
        self._skew = Skew(job.slack)
        self._inflows = [Inflow(1, job.window) for _ in replicas]
        self._copies: Counter[Piece] = Counter()
        self._look = False
        for replica in replicas:
            copies = replica.machine.count / machine.count
            self.outlet.open(replica.rank, replica, out=copies)

    def arrive(self, rank: int, piece: Piece, offset: int, seq: int) -> None:
        """A push has come over the link."""
        self.outlet.take(rank, piece, lambda: self._receive(rank, piece, offset, seq))

    def _receive(self, rank: int, piece: Piece, offset: int, seq: int) -> None:
        inflow = self._inflows[rank]
        inflow.arrived(offset, self._clock.now)
        inflow.progress += piece.slice.length
        target, grant = self._replicas[rank].outlet, self._offer(rank)
        self._network.tell(lambda: target.heard(self.number, grant, seq))
        self._grants()
        self._copies[piece] += 1
        if self._copies[piece] == len(self._replicas):
            del self._copies[piece]
            priority = self._job.priority(piece.unit)
            for reader in self._replicas:
                self.outlet.push(reader.rank, piece, priority)
        self.outlet.hands.pump()

    def _offer(self, rank: int) -> Grant | None:
        inflow = self._inflows[rank]
        return inflow.offer(self._skew.ahead(inflow, self._inflows, self._clock.now))

    def _grants(self) -> None:
        """Tell everybody for whom it is news; look again while somebody is held back."""
        for replica in self._replicas:
            self._tell(replica)
        told = [inflow.told for inflow in self._inflows]
        held = any(t is not None and t.hold < t.limit for t in told)
        quiet = self._clock.now - max(inflow.last for inflow in self._inflows)
        if held and not self._look and quiet < 2 * ACTIVE:  # later nothing changes by time alone
            self._look = True
            self._clock.at(self._clock.now + ACTIVE, self._looked)

    def _tell(self, replica: Replica) -> None:
        grant = self._offer(replica.rank)
        if grant is not None:
            self._network.tell(lambda: replica.outlet.heard(self.number, grant))

    def _looked(self) -> None:
        self._look = False
        self._grants()
