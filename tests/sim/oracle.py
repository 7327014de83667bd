"""The oracle: payloads that show how often each rank was counted, and checks of every element.

Worker w pushes 4**w in even elements and, in odd ones, the version and the element's place by
turns. In base 4 the even elements of a sum have digit w = how often rank w was counted: 0 is lost,
2 is double. The odd ones show a mix of versions, or bytes in the wrong place. All of it is exact in
every dtype used here for up to 5 ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gradsum.scheduler.table import TensorSpec
from gradsum.worker.rounds import Op

Array = np.ndarray[Any, Any]
PLACES = 61


class Violation(AssertionError):
    """The service returned a wrong sum, or an answer that contradicts what was pushed."""


def payload(spec: TensorSpec, key: int, rank: int, version: int) -> Array:
    """What ``rank`` pushes of this tensor in this version."""
    place = np.arange(spec.elements)
    values = np.where(
        place % 2 == 0, 4**rank, np.where(place % 4 == 1, version, (7 * place + key) % PLACES)
    )
    return values.astype(spec.wire)


def digits(value: float, ranks: int) -> list[int]:
    """How often each rank was counted in an even element of a sum."""
    return [int(value) // 4**rank % 4 for rank in range(ranks)]


class Box:
    """A Sink that keeps the sum as float64 and how many bytes were written, element by element."""

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.values = np.full(spec.elements, np.nan)
        self.writes = np.zeros(spec.elements, dtype=int)
        self.calls = 0

    def write(self, offset: int, payload: memoryview, members: int, exponent: int) -> None:
        """Take a piece; see Sink."""
        self.calls += 1
        piece = np.frombuffer(payload, self.spec.wire) if payload.nbytes else np.empty(0)
        first = offset // np.dtype(self.spec.wire).itemsize
        self.values[first : first + piece.size] = piece.astype(float) * 2.0**exponent
        self.writes[first : first + piece.size] += 1


class Oracle:
    """Knows who pushed what, and judges what comes back."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.checked = 0
        self._first: dict[tuple[int, int], tuple[int, Array]] = {}

    def judge(self, rank: int, op: Op, spec: TensorSpec, pushed: Iterable[int]) -> None:
        """An op of a reader is complete: ``pushed`` are the ranks that were not ABSENT."""
        pushed = list(pushed)
        members = self.ranks if spec.policy.kind == "sum" else 1
        where = f"rank {rank}, tensor {spec.name!r}, version {op.version}"
        if op.members != members:
            raise Violation(f"{where}: members {op.members}, expected {members}")
        if op.present != bool(pushed):
            raise Violation(f"{where}: present {op.present}, but {pushed} pushed")
        box = op.sink
        if not isinstance(box, Box):
            raise Violation(f"{where}: a reader without a sink")
        if not pushed:
            if box.calls:
                raise Violation(f"{where}: a gradient that nobody pushed was written")
            return
        self._values(where, rank, op, spec, pushed, box)

    def _values(
        self, where: str, rank: int, op: Op, spec: TensorSpec, pushed: list[int], box: Box
    ) -> None:
        if (box.writes != 1).any():
            raise Violation(f"{where}: elements written {sorted(set(box.writes.tolist()))} times")
        want = np.sum(
            [payload(spec, op.key, r, op.version).astype(float) for r in pushed], axis=0
        )
        wrong = np.flatnonzero(box.values != want)
        if wrong.size:
            at = int(wrong[0])
            raise Violation(
                f"{where}: {wrong.size} of {want.size} elements differ, first [{at}] = "
                f"{box.values[at]} for {want[at]}, digits {digits(box.values[at], self.ranks)}"
            )
        other, values = self._first.setdefault((op.key, op.version), (rank, box.values))
        if values.tobytes() != box.values.tobytes():
            raise Violation(f"{where}: differs from what rank {other} received")
        self.checked += 1
