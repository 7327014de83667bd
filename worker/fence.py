"""Gate: where the training thread stops for a planned epoch (E1). No I/O.

The training thread counts fence points; the comm thread hears of fences. Both sides hold the same
lock around these calls, so a fence is accepted only while its step lies ahead. Several threads may
take steps: while one stands at the fence the others stop there too, and their steps count after it.
"""

from __future__ import annotations

from gradsum.proto.control import Fence


class Gate:
    """This worker's step and the fence that lies ahead, if any."""

    __slots__ = ("_later", "fence", "number", "step", "waiting")

    def __init__(self) -> None:
        self.step = 0
        self.number = 0
        self.fence: Fence | None = None
        self.waiting = False
        self._later = 0

    def arrive(self) -> bool:
        """The training thread passed a fence point; True: it must wait for the release."""
        if self.waiting:
            self._later += 1
            return True
        self.step += 1
        self.waiting = self.fence is not None and self.step == self.fence.step
        return self.waiting

    def announce(self, fence: Fence) -> tuple[bool, bool]:
        """A fence is announced: (acceptable, release the training thread).

        A later number replaces an earlier one, so a thread that waits at the old step goes on.
        """
        if fence.number < self.number or (fence.number == self.number and self.fence is None):
            return False, False
        if fence.number == self.number:
            return True, False
        self.number = fence.number
        release = self._leave()
        ahead = self.step < fence.step
        self.fence = fence if ahead else None
        return ahead, release

    def open(self, number: int) -> bool:
        """GO or its abort for this fence or a later one; True: release the training thread."""
        if number < self.number:
            return False
        self.number = number
        self.fence = None
        return self._leave()

    def _leave(self) -> bool:
        self.step += self._later
        self._later = 0
        waited, self.waiting = self.waiting, False
        return waited
