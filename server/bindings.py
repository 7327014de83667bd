"""Bindings: which connection speaks for which rank (I2). No I/O.

Routing ids are the socket's and never trusted: a connection counts for a rank once it has shown
that rank's token, and only while data and control connection are of the same generation.
"""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """A connection's rank and the worker's connection generation."""

    rank: int
    generation: int


class Bindings:
    """Both directions of the map, for one kind of socket each."""

    __slots__ = ("_control", "_control_ids", "_data", "_data_ids")

    def __init__(self) -> None:
        self._data: dict[bytes, Bound] = {}
        self._control: dict[bytes, Bound] = {}
        self._data_ids: dict[int, bytes] = {}
        self._control_ids: dict[int, bytes] = {}

    def bind_data(self, peer: bytes, rank: int, generation: int) -> bool:
        """Bind a data connection; True when both are bound at this generation now."""
        self._bind(self._data, self._data_ids, peer, Bound(rank, generation))
        return self._complete(rank, generation)

    def bind_control(self, peer: bytes, rank: int, generation: int) -> bool:
        """Bind a control connection; True when both are bound at this generation now."""
        self._bind(self._control, self._control_ids, peer, Bound(rank, generation))
        return self._complete(rank, generation)

    @staticmethod
    def _bind(
        bound: dict[bytes, Bound], ids: dict[int, bytes], peer: bytes, claim: Bound
    ) -> None:
        old = ids.get(claim.rank)
        if old is not None and bound[old].generation > claim.generation:
            return  # a late message of a connection that was given up
        if old is not None:
            del bound[old]
        bound[peer] = claim
        ids[claim.rank] = peer

    def _complete(self, rank: int, generation: int) -> bool:
        claim = Bound(rank, generation)
        data, control = self._data_ids.get(rank), self._control_ids.get(rank)
        return (
            data is not None
            and control is not None
            and self._data[data] == claim
            and self._control[control] == claim
        )

    def data(self, peer: bytes) -> Bound | None:
        """Whom a data connection speaks for."""
        return self._data.get(peer)

    def control(self, peer: bytes) -> Bound | None:
        """Whom a control connection speaks for."""
        return self._control.get(peer)

    def data_peer(self, rank: int) -> bytes | None:
        """Where sums for a rank go."""
        return self._data_ids.get(rank)

    def control_peer(self, rank: int) -> bytes | None:
        """Where records for a rank go."""
        return self._control_ids.get(rank)

    def drop_data(self, rank: int) -> None:
        """The data connection of a rank is gone."""
        peer = self._data_ids.pop(rank, None)
        if peer is not None:
            del self._data[peer]

    def drop_control(self, rank: int) -> None:
        """The control connection of a rank is gone."""
        peer = self._control_ids.pop(rank, None)
        if peer is not None:
            del self._control[peer]

    def clear(self) -> None:
        """The job is over."""
        for table in (self._data, self._control, self._data_ids, self._control_ids):
            table.clear()
