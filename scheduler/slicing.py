"""From tensors to slices: which bytes travel together, and which server adds them (E8, DESIGN 6).

A unit is what travels as one stream of versions: one tensor, or a buffer of packed small ones. It
is cut into slices of at most ``slice_bytes`` whole elements, and each slice is dealt to the server
that is furthest behind its share, so that at every moment servers carry bytes in proportion to
their weights.

The layout is a pure function of the plan and the table and is append-stable: new tensors never move
old slices. Hence no slice table is ever sent; every process computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gradsum.errors import ConfigError
from gradsum.proto.dtypes import size_of
from gradsum.proto.limits import MAX_PACKED, MAX_SLICE
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import Table, TensorSpec


class Slice(NamedTuple):
    """Bytes [offset, offset + length) of a unit, added by the server at ``server`` in the plan."""

    number: int
    offset: int
    length: int
    server: int


class Member(NamedTuple):
    """A tensor's place in a unit."""

    key: int
    offset: int
    length: int


class Unit(NamedTuple):
    """A stream of versions on the wire; ``key`` is that of its first member."""

    key: int
    members: tuple[Member, ...]
    nbytes: int
    wire: str
    policy: Policy
    slices: tuple[Slice, ...]

    @property
    def packed(self) -> bool:
        """Whether several tensors share this unit (their presence travels as a mask)."""
        return len(self.members) > 1


class Layout:
    """The units of a table under one plan; ``extend`` follows the table as it grows."""

    __slots__ = ("_assigned", "_clocks", "_pack_bytes", "_packing", "_slice_bytes", "_table",
                 "_total", "_weights", "known", "unit_of", "units")  # fmt: skip

    def __init__(
        self,
        table: Table,
        *,
        slice_bytes: int,
        weights: tuple[float, ...],
        pack_bytes: int = 0,
        packing: tuple[int, ...] = (),
        packed: int = 0,
        clocks: Mapping[int, int] | None = None,
    ) -> None:
        """packing: keys in ready order; packed: the length of the table they were chosen from;
        clocks: where versions start, since a buffer has one version for all its tensors.
        """
        if slice_bytes < 1 or not weights or min(weights) < 0 or sum(weights) <= 0:
            raise ConfigError(f"slice_bytes={slice_bytes}, weights={weights} give no slices")
        self._table = table
        self._slice_bytes = min(slice_bytes, MAX_SLICE)
        self._weights = tuple(weight / sum(weights) for weight in weights)
        self._assigned = [0] * len(weights)
        self._total = 0
        self._pack_bytes = pack_bytes
        self._packing = packing
        self._clocks = clocks or {}
        self.units: dict[int, Unit] = {}
        self.unit_of: dict[int, Unit] = {}
        self.known = 0
        self._pack(packed)
        self.extend()

    def extend(self) -> None:
        """Take in what was appended to the table since the last call."""
        for key in range(self.known, len(self._table)):
            if key not in self.unit_of:
                self._add((key,))
        self.known = len(self._table)

    def _pack(self, packed: int) -> None:
        """Deal the tensors of the packing first, in ready order, small ones in shared buffers."""
        if not self._packing:
            return
        buffers: dict[tuple[Policy, str, int], list[int]] = {}
        sizes: dict[tuple[Policy, str, int], int] = {}
        for key in self._packing:
            spec = self._table[key]
            if key >= packed or not self._small(spec):
                self._add((key,))
                continue
            group = (spec.policy, spec.wire, self._clocks.get(key, spec.first - 1))
            waiting = buffers.setdefault(group, [])
            full = sizes.get(group, 0) + spec.nbytes > self._pack_bytes
            if waiting and (full or len(waiting) == MAX_PACKED):
                self._add(tuple(waiting))
                waiting.clear()
                sizes[group] = 0
            waiting.append(key)
            sizes[group] = sizes.get(group, 0) + spec.nbytes
        for waiting in buffers.values():
            if waiting:
                self._add(tuple(waiting))

    def _small(self, spec: TensorSpec) -> bool:
        return spec.policy.pack != "" and 0 < spec.nbytes < self._pack_bytes

    def _add(self, keys: tuple[int, ...]) -> None:
        members: list[Member] = []
        offset = 0
        for key in keys:
            members.append(Member(key, offset, self._table[key].nbytes))
            offset += self._table[key].nbytes
        first = self._table[keys[0]]
        unit = Unit(
            keys[0], tuple(members), offset, first.wire, first.policy,
            self._cut(offset, size_of(first.wire)),
        )  # fmt: skip
        self.units[unit.key] = unit
        for key in keys:
            self.unit_of[key] = unit

    def _cut(self, nbytes: int, element: int) -> tuple[Slice, ...]:
        """Whole elements, at least one a slice; a tensor without elements is one empty slice."""
        step = max(self._slice_bytes // element, 1) * element
        slices: list[Slice] = []
        for number, offset in enumerate(range(0, max(nbytes, 1), step)):
            length = min(step, nbytes - offset)
            slices.append(Slice(number, offset, length, self._deal(length)))
        return tuple(slices)

    def _deal(self, length: int) -> int:
        """The server furthest behind its share once these bytes are counted; ties: lower index."""
        self._total += length
        server = max(
            (index for index, weight in enumerate(self._weights) if weight > 0),
            key=lambda index: self._weights[index] * self._total - self._assigned[index],
        )
        self._assigned[server] += length
        return server
