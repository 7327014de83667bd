"""What all members of a simulated job know: the model's units, their urgency, the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gradsum.scheduler.credit import Bounds
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.profiles import Profile
from gradsum.scheduler.schedule import Schedule
from gradsum.scheduler.slicing import Layout, Slice, Unit
from gradsum.scheduler.table import Table, TensorSpec


class Piece(NamedTuple):
    """A slice of one version on its way."""

    unit: int
    slice: Slice
    version: int


@dataclass(frozen=True, slots=True)
class Job:
    """layers_of, units_of: which unit carries gradients of which layer, and back; frame_bytes: of
    the slices that the simulated ones stand for."""

    profile: Profile
    layout: Layout
    schedule: Schedule
    barrier: bool
    slice_bytes: int
    frame_bytes: int
    layers_of: dict[int, tuple[int, ...]]
    units_of: tuple[tuple[int, ...], ...]

    def priority(self, unit: int) -> int:
        """Of a unit: that of its first layer in forward order."""
        return min(self.layers_of[unit])

    def frames(self, piece: Piece, copies: float) -> float:
        """Real frames that a member handles for a simulated one of so many copies."""
        return max(1.0, copies * piece.slice.length / self.frame_bytes)

    @property
    def units(self) -> dict[int, Unit]:
        """By key."""
        return self.layout.units

    @property
    def window(self) -> int:
        """Bytes that one sender may have on its way to one receiver."""
        return Bounds().window(self.slice_bytes)

    @property
    def slack(self) -> int:
        """Bytes by which a sender may lead."""
        return Bounds().slack(self.slice_bytes)


def describe(
    profile: Profile, schedule: Schedule, *, barrier: bool, slice_bytes: int, frame_bytes: int,
    pack_bytes: int, weights: tuple[float, ...],
) -> Job:  # fmt: skip
    """The job of a model: its table and layout, packed in the order of the backward pass."""
    table, layer_of = Table(), []
    for number, layer in enumerate(profile.layers):
        for place, count in enumerate(layer.tensors):
            table.append(TensorSpec(
                f"{number}.{place}", "float32", "float32", (count,), Policy(pack="job")
            ))  # fmt: skip
            layer_of.append(number)
    order = sorted(range(len(table)), key=lambda key: (-layer_of[key], key))
    layout = Layout(
        table, slice_bytes=slice_bytes, weights=weights, pack_bytes=pack_bytes,
        packing=tuple(order), packed=len(table),
    )  # fmt: skip
    layers_of = {
        unit.key: tuple(sorted({layer_of[member.key] for member in unit.members}))
        for unit in layout.units.values()
    }
    units_of = tuple(
        tuple(key for key, layers in layers_of.items() if number in layers)
        for number in range(len(profile.layers))
    )
    return Job(profile, layout, schedule, barrier, slice_bytes, frame_bytes, layers_of, units_of)
