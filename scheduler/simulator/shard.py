"""A simulated server: slices come in, sums go out when all copies are in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gradsum.scheduler.credit import ACTIVE, FRAME_COST, NEWS, Grant, Inflow, Skew
from gradsum.scheduler.queue import TransferQueue
from gradsum.scheduler.simulator.clock import Clock
from gradsum.scheduler.simulator.hands import Hands
from gradsum.scheduler.simulator.job import Job, Piece
from gradsum.scheduler.simulator.network import Machine, Network
from gradsum.scheduler.simulator.replica import Replica
from gradsum.scheduler.uplink import Uplink


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
        self._queue: TransferQueue[Piece] = TransferQueue(
            lambda _lane, _item: True, NEWS, urgent=job.schedule.urgent_replies
        )
        self._uplink = Uplink()
        self._skew = Skew(job.slack)
        self._inflows = [Inflow(1, job.window) for _ in replicas]
        self._hands = Hands(clock, cost, self._depart)
        self._copies: Counter[Piece] = Counter()
        self._look = False
        for replica in replicas:
            self._queue.open(replica.rank, 1, job.window)

    def arrive(self, rank: int, piece: Piece, offset: int, seq: int) -> None:
        """A push has come over the link."""
        frames = self._frames(self._replicas[rank], piece)
        self._hands.take(frames, lambda: self._receive(rank, piece, offset, seq))

    def _receive(self, rank: int, piece: Piece, offset: int, seq: int) -> None:
        inflow = self._inflows[rank]
        inflow.arrived(offset, self._clock.now)
        inflow.progress += piece.slice.length
        replica, grant = self._replicas[rank], self._grant(rank)
        self._network.tell(lambda: replica.receipt(self.number, seq, grant))
        self._grants()
        self._copies[piece] += 1
        if self._copies[piece] == len(self._replicas):
            del self._copies[piece]
            for reader in self._replicas:
                self._queue.push(
                    reader.rank, self._job.priority(piece.unit), piece.slice.length + FRAME_COST,
                    piece,
                )  # fmt: skip
        self._hands.pump()

    def _grant(self, rank: int) -> Grant | None:
        inflow = self._inflows[rank]
        grant = inflow.grant(self._skew.ahead(inflow, self._inflows, self._clock.now))
        if not inflow.news(grant):
            return None
        inflow.told = grant
        return grant

    def _grants(self) -> None:
        """Tell everybody for whom it is news; look again while somebody is held back."""
        for replica in self._replicas:
            self._offer(replica)
        told = [inflow.told for inflow in self._inflows]
        if not self._look and any(t is not None and t.hold < t.limit for t in told):
            self._look = True
            self._clock.at(self._clock.now + ACTIVE, self._looked)

    def _offer(self, replica: Replica) -> None:
        grant = self._grant(replica.rank)
        if grant is not None:
            self._network.tell(lambda: replica.granted(self.number, grant))

    def _looked(self) -> None:
        self._look = False
        self._grants()

    def granted(self, rank: int, grant: Grant) -> None:
        """A worker lets us go on."""
        before = self._queue.arrived
        self._queue.grant(rank, *grant)
        self._uplink.arrived(self._queue.arrived - before, self._queue.under_way, self._clock.now)
        self._queue.bound = self._job.schedule.bound(self._uplink.bound, self._job.slice_bytes)
        self._hands.pump()

    def _depart(self) -> float:
        departure = self._queue.pop()
        if departure is None:
            return 0
        self._uplink.departed(self._clock.now)
        replica, piece, offset = self._replicas[departure.lane], departure.item, departure.offset
        nbytes = piece.slice.length + FRAME_COST
        out = nbytes * replica.machine.count / self.machine.count
        self._network.send(
            self.machine, replica.machine, out, nbytes,
            lambda: replica.arrive(self.number, piece, offset),
        )  # fmt: skip
        return self._frames(replica, piece)

    def _frames(self, replica: Replica, piece: Piece) -> float:
        copies = replica.machine.count / self.machine.count
        return max(1.0, copies * piece.slice.length / self._job.frame_bytes)
