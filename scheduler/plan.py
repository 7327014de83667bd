"""Plan: one epoch's immutable answer to who takes part and where slices live."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from gradsum.proto.control import PlanMessage, ServerInfo
from gradsum.scheduler.slicing import Layout
from gradsum.scheduler.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Plan:
    """A PlanMessage with look-ups. ``versions``: key -> version at the fence (V3)."""

    message: PlanMessage
    members: Mapping[int, int]
    versions: Mapping[int, int]
    tokens: Mapping[int, bytes]

    @classmethod
    def of(cls, message: PlanMessage) -> Plan:
        """The plan that a message describes."""
        return cls(
            message,
            MappingProxyType(dict(message.members)),
            MappingProxyType(dict(message.versions)),
            MappingProxyType(dict(message.tokens)),
        )

    @property
    def epoch(self) -> int:
        """Number of this plan, increasing."""
        return self.message.epoch

    @property
    def job(self) -> str:
        """The job that the plan belongs to."""
        return self.message.job

    @property
    def servers(self) -> tuple[ServerInfo, ...]:
        """The shards; slices name them by position."""
        return self.message.servers

    def base(self, key: int, table: Table) -> int:
        """The version where all clocks of a key start: the next one is pushed first."""
        return self.versions.get(key, table[key].first - 1)

    def layout(self, table: Table) -> Layout:
        """Units and slices of the table under this plan."""
        message = self.message
        return Layout(
            table,
            slice_bytes=message.slice_bytes,
            weights=tuple(server.weight for server in message.servers),
            pack_bytes=message.pack_bytes,
            packing=message.packing,
            packed=message.packed,
            clocks=self.versions,
        )
