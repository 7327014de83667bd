"""Passage: what a worker says while its training thread stands at a fence (E1). No I/O.

First what it has submitted, once no broadcast of its own is still owed to a reader; then, when the
coordinator has said what can complete, that these sums are in. Each is said again until GO comes.
"""

from __future__ import annotations

from typing import Final

from gradsum.proto.control import AtFence, Consume, Consumed
from gradsum.worker.core import Core

REPEAT: Final = 1.0
NEVER: Final = float("inf")


class Passage:
    """``due``: when the next repetition is; news of sums come by themselves."""

    __slots__ = ("_said", "due", "target")

    def __init__(self) -> None:
        self._said = ""
        self.due = NEVER
        self.target: Consume | None = None

    @property
    def begun(self) -> bool:
        """Whether the core has been paused for the fence."""
        return self._said != ""

    def reset(self) -> None:
        """The fence is over, or another has taken its place."""
        self._said, self.due = "", NEVER

    def say(self, number: int, core: Core, now: float) -> AtFence | Consumed | None:
        """The message for this moment at fence ``number``, if any."""
        target = self.target
        aimed = target is not None and target.number == number
        phase = f"consumed {number}" if aimed else f"at {number}"
        if phase == self._said and now < self.due < NEVER:
            return None
        self._said, self.due = phase, NEVER
        message: AtFence | Consumed
        if target is not None and aimed:
            if not core.consumed(target.versions):
                return None  # a sum will wake us
            message = Consumed(number)
        elif not core.resting():
            return None  # an acknowledgement will
        else:
            message = AtFence(number, core.submitted())
        self.due = now + REPEAT
        return message
