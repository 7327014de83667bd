"""Bundles: the small tensors of one push_pull list travel in one buffer (DESIGN 6).

A list is handed over as a whole on every rank, so no tensor of it waits for a neighbour that never
comes. Rules: tensors of one dtype below ``pack_bytes`` share a row of memory, which is one tensor
to the service; the row is filled when the list is handed over and emptied when it is waited for.
Every tensor is registered under its own name too, so that ranks whose lists differ get both sides
named (I1); the check of a list seen before costs a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradsum.errors import UsageError
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import TensorSpec
from gradsum.worker.face import Handle, Session
from gradsum.worker.sinks import TensorSink
from gradsum.worker.tensors import SUMMED, source_bytes

if TYPE_CHECKING:
    from gradsum.worker.client import Client, Entry


class Row(NamedTuple):
    """Memory of one bundle: flat, and cut into its tensors."""

    flat: torch.Tensor
    pieces: list[torch.Tensor]
    shared: bool


class Load:
    """One round of a bundle."""

    __slots__ = ("_bundle", "_inplace", "_row", "_sink", "_tensors", "_versions", "handle")

    def __init__(
        self, bundle: Bundle, row: Row, tensors: list[torch.Tensor], sink: TensorSink,
        handle: Handle, inplace: bool,
    ) -> None:  # fmt: skip
        self._bundle = bundle
        self._row = row
        self._tensors = tensors
        self._sink = sink
        self._inplace = inplace
        self._versions = _versions(tensors) if inplace else []
        self.handle = handle

    def finish(self) -> dict[int, torch.Tensor]:
        """The results by their place in the list; after the handle is done."""
        self._sink.finish()
        row = self._row
        if self._inplace:
            if self._versions != _versions(self._tensors):
                raise UsageError(
                    f"a tensor of {self.handle.name!r} was changed while its sum was on the way",
                    tensor=self.handle.name,
                    hint="call synchronize() before you change it",
                )
            with torch.no_grad():
                torch._foreach_copy_(self._tensors, row.pieces)
            results = self._tensors
        else:
            results = [piece.clone() for piece in row.pieces]
        self._bundle.give(row)
        return dict(zip(self._bundle.places, results, strict=True))


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


class Bundle:
    """Tensors at ``places`` of a list, as one tensor of the service."""

    __slots__ = ("_entry", "_rows", "_shapes", "places")

    def __init__(self, entry: Entry, places: list[int], shapes: list[torch.Size]) -> None:
        self.places = places
        self._entry = entry
        self._shapes = shapes
        self._rows: list[Row] = []

    def begin(
        self, session: Session, tensors: list[torch.Tensor], average: bool, urgency: int,
        inplace: bool,
    ) -> Load:  # fmt: skip
        """Copy the tensors in and hand them over."""
        row = self._take(session)
        spec = self._entry.spec
        with torch.no_grad():
            torch._foreach_copy_(row.pieces, tensors)
        sink = TensorSink(row.flat, spec.wire, average)
        handle = self._entry.submit(session, source_bytes(row.flat, spec), sink, urgency)
        return Load(self, row, tensors, sink, handle, inplace)

    def _take(self, session: Session) -> Row:
        """A free row, or a new one; not one that servers of this host cannot see but could."""
        while self._rows:
            row = self._rows.pop()
            if row.shared == session.sharing:
                return row
        spec, shared = self._entry.spec, session.sharing
        dtype: torch.dtype = getattr(torch, spec.dtype)
        flat = torch.frombuffer(session.buffer(spec.shape[0] * dtype.itemsize), dtype=dtype)
        counts = [shape.numel() for shape in self._shapes]
        pieces = [
            piece.view(shape) for piece, shape in zip(flat.split(counts), self._shapes, strict=True)
        ]
        return Row(flat, pieces, shared)

    def give(self, row: Row) -> None:
        """The row is free."""
        self._rows.append(row)


class Bundles:
    """How one list of tensors is divided, decided at its first call."""

    __slots__ = ("_signature", "alone", "shared")

    def __init__(
        self, client: Client, specs: list[TensorSpec], tensors: Sequence[torch.Tensor], name: str
    ) -> None:
        self._signature = _signature(tensors)
        limit = client.session.pack_bytes
        groups: dict[tuple[str, str, Policy], list[int]] = {}
        for place, (spec, tensor) in enumerate(zip(specs, tensors, strict=True)):
            small = tensor.device.type == "cpu" and 0 < spec.nbytes < limit
            if small and tensor.dtype in SUMMED and not tensor.is_complex():
                groups.setdefault((spec.dtype, spec.wire, spec.policy), []).append(place)
        kept = {kind: places for kind, places in groups.items() if len(places) > 1}
        rows = [
            TensorSpec(
                f"{name}[{kind[0]}]", kind[0], kind[1],
                (sum(tensors[place].numel() for place in places),), kind[2], 1,
            ) for kind, places in kept.items()
        ]  # fmt: skip
        entries = client.enter([*specs, *rows])
        self.shared = [
            Bundle(entry, places, [tensors[place].shape for place in places])
            for entry, places in zip(entries[len(specs) :], kept.values(), strict=True)
        ]
        taken = {place for places in kept.values() for place in places}
        self.alone = [(p, entries[p]) for p in range(len(tensors)) if p not in taken]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a list is like the one that this was made for."""
        tensorial = all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        return tensorial and _signature(tensors) == self._signature


def _signature(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [(t.shape, t.dtype, t.device, t.layout) for t in tensors]
