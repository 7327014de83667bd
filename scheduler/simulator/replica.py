"""A simulated worker: it computes by the profile, pushes what is ready, waits for what it needs.

The forward pass of a layer waits for the sums of its own parameters, or with a barrier the first
one for all. A layer's gradients can leave when its backward pass ends; a shared buffer when the
last of its tensors is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradsum.scheduler.credit import Inflow
from gradsum.scheduler.queue import TransferQueue
from gradsum.scheduler.simulator.clock import Clock
from gradsum.scheduler.simulator.job import Job, Piece
from gradsum.scheduler.simulator.network import Machine, Network
from gradsum.scheduler.simulator.outlet import Outlet

if TYPE_CHECKING:
    from gradsum.scheduler.simulator.shard import Shard


class Replica:
    """begins: when each step began, in virtual time; waited: seconds in which nothing computed."""

    def __init__(
        self, rank: int, clock: Clock, network: Network, machine: Machine, job: Job, cost: float
    ) -> None:
        """cost: seconds of the hands for each frame."""
        self.rank = rank
        self.machine = machine
        self.begins: list[float] = []
        self.waited = 0.0
        self._clock = clock
        self._network = network
        self._job = job
        self._shards: Sequence[Shard] = ()
        queue = TransferQueue[Piece](lambda *_: True, urgent=job.schedule.urgent_pushes)
        self.outlet = Outlet(rank, clock, network, machine, job, cost, queue)
        self._inflows: list[Inflow] = []
        self._version = 0
        self._missing: dict[int, int] = {}  # slices of a unit whose sums are not in
        self._owed = [0] * len(job.profile.layers)  # units of a layer whose sums are not in
        self._unready: dict[int, int] = {}  # layers of a unit still to go backward
        self._layer = 0
        self._stopped: float | None = None

    def connect(self, shards: Sequence[Shard]) -> None:
        """Know the servers; the first windows are free."""
        self._shards = shards
        for shard in shards:
            copies = self.machine.count / shard.machine.count
            self.outlet.open(shard.number, shard, into=copies)
            self._inflows.append(Inflow(1, self._job.window))

    # -- training -----------------------------------------------------------------------------

    def begin(self) -> None:
        """A step."""
        self.begins.append(self._clock.now)
        self._version += 1
        self._unready = {key: len(layers) for key, layers in self._job.layers_of.items()}
        self._layer = 0
        self._forward()

    def _forward(self) -> None:
        """The next layer's forward pass, when its parameters are there."""
        layers = self._job.profile.layers
        if self._layer == len(layers):
            self._layer -= 1
            self._backward()
            return
        first = self._job.barrier and not self._layer
        if any(self._owed) if first else self._owed[self._layer]:
            if self._stopped is None:
                self._stopped = self._clock.now
            return
        if self._stopped is not None:
            self.waited += self._clock.now - self._stopped
            self._stopped = None
        self._layer += 1
        self._clock.at(self._clock.now + layers[self._layer - 1].forward, self._forward)

    def _backward(self) -> None:
        after = self._job.profile.layers[self._layer].backward
        self._clock.at(self._clock.now + after, self._ready)

    def _ready(self) -> None:
        """A layer's gradients are complete."""
        for key in self._job.units_of[self._layer]:
            self._owed[self._layer] += 1
            self._unready[key] -= 1
            if not self._unready[key]:
                self._submit(key)
        self.outlet.hands.pump()
        self._layer -= 1
        if self._layer < 0:
            self.begin()
        else:
            self._backward()

    def _submit(self, key: int) -> None:
        unit, priority = self._job.units[key], self._job.priority(key)
        self._missing[key] = len(unit.slices)
        for each in unit.slices:
            self.outlet.push(each.server, Piece(key, each, self._version), priority)

    # -- receiving ----------------------------------------------------------------------------

    def arrive(self, shard: int, piece: Piece, offset: int, seq: int) -> None:
        """A sum has come over the link."""
        self.outlet.take(shard, piece, lambda: self._receive(shard, piece, offset))

    def _receive(self, shard: int, piece: Piece, offset: int) -> None:
        inflow = self._inflows[shard]
        inflow.arrived(offset, self._clock.now)
        grant = inflow.offer()
        if grant is not None:
            target = self._shards[shard].outlet
            self._network.tell(lambda: target.heard(self.rank, grant))
        self._missing[piece.unit] -= 1
        if not self._missing[piece.unit]:
            for layer in self._job.layers_of[piece.unit]:
                self._owed[layer] -= 1
            if self._stopped is not None:
                self._forward()
        self.outlet.hands.pump()
