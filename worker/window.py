"""Windows of one optimizer: what a window's firings and its end mean for each tensor (V1, V3-V5).

Pure: events in (a hook fired, the window closes), decisions out (push now, push, declare absent).
Invariants: the window number is the version of every tensor in it; each tensor is pushed or
declared absent exactly once per window; nothing is pushed early before every rank's window 1 is
known.
Tensors are known by index, in registration order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Verdict(NamedTuple):
    """What the end of a window asks for: tensors by index, to submit under ``version``."""

    version: int
    push: list[int]
    absent: list[int]


class Lesson(NamedTuple):
    """What window 1 taught: firings per tensor and the order in which they got ready."""

    counts: dict[int, int]
    order: list[int]


class Window:
    """The open window of one optimizer.

    passes: backward passes per step as promised by the user; no tensor is pushed early before as
    many firings.
    """

    def __init__(self, passes: int = 1) -> None:
        self.version = 1
        self.passes = passes
        self.synchronized = False
        self._size = 0
        self._need: dict[int, int] | None = None
        self._relearning = False
        self._count: dict[int, int] = {}
        self._ready: dict[int, None] = {}
        self._pushed: set[int] = set()

    def grow(self, count: int) -> None:
        """``count`` more tensors take part from this window on (V3)."""
        self._size += count

    @property
    def touched(self) -> bool:
        """Whether a hook fired since the last close."""
        return bool(self._ready)

    @property
    def untaught(self) -> bool:
        """Whether ``learn`` is still to come."""
        return self._need is None and not self._relearning and self.version > 1

    def learn(self, needs: Mapping[int, int]) -> None:
        """Firings per window over all ranks: pushes may start early from now on."""
        self._need = dict(needs)

    def relearn(self, passes: int) -> None:
        """The user changes the number of passes: the next window is counted, and pushes at its end.

        Only this rank's own count is used then; tensors that do not fire stay with their close.
        """
        self.passes = passes
        if self.version > 1:
            self._need = None
            self._relearning = True

    def lesson(self) -> Lesson | None:
        """Before window 1 closes: what it taught. None in every other window."""
        return Lesson(dict(self._count), list(self._ready)) if self.version == 1 else None

    def is_sent(self, index: int) -> bool:
        """Whether another firing would change bytes that are on their way (V4)."""
        return index in self._pushed

    def fire(self, index: int, held: bool = False) -> bool:
        """A gradient was accumulated; True: it is complete, push it now. held: in ``no_sync``."""
        self.synchronized = False
        self._ready.pop(index, None)
        self._ready[index] = None
        if held:
            return False
        count = self._count[index] = self._count.get(index, 0) + 1
        need = 0 if self._need is None else self._need.get(index, 0)
        return need > 0 and count >= max(need, self.passes)

    def sent(self, index: int) -> None:
        """The tensor's bytes left in this window, before its end."""
        self._pushed.add(index)

    def unsent(self, by_hand: Collection[int] = ()) -> list[int]:
        """Tensors with a gradient that did not leave yet, in ready order."""
        given = [*self._ready, *(i for i in sorted(by_hand) if i not in self._ready)]
        return [i for i in given if i not in self._pushed]

    def close(self, push: list[int]) -> Verdict:
        """End the window: ``push`` of what did not leave yet leaves now, the rest is absent."""
        present = self._pushed.union(push)
        absent = [i for i in range(self._size) if i not in present]
        verdict = Verdict(self.version, push, absent)
        if self._relearning and self._count:
            self._need = dict(self._count)
            self._relearning = False
        self.version += 1
        self.synchronized = True
        self._count.clear()
        self._ready.clear()
        self._pushed.clear()
        return verdict
