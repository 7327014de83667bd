"""How long training steps take, from the fence points that workers report.

Rules: each worker tells, with its heartbeats, the number of its last fence point and the moment by
its own clock; two such pairs give the mean of the steps between them, exact however late the
messages come. A sample is complete when every rank has moved on; the slowest rank's mean counts.
What lies before the step ``after`` does not count: the plan was another, or ranks stood at a fence.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradsum.scheduler.tuner import Took

Passed = tuple[int, float]
"""Number of a fence point, and when it was reached."""


class Paces:
    """Where each rank's next sample starts."""

    __slots__ = ("_after", "_since")

    def __init__(self) -> None:
        self._after = 1  # the first step builds connections, memory and the order
        self._since: dict[int, Passed] = {}

    def reset(self, after: int) -> None:
        """Only steps that begin at ``after`` or later count from here on."""
        self._after = after
        self._since.clear()

    def take(self, passed: Mapping[int, Passed | None]) -> Took | None:
        """The steps since the last sample, once all ranks have taken one; None until then."""
        self._since = {rank: since for rank, since in self._since.items() if rank in passed}
        for rank, now in passed.items():
            if now is not None and now[0] >= self._after:
                self._since.setdefault(rank, now)
        spans: list[tuple[float, int]] = []
        latest: dict[int, Passed] = {}
        for rank, now in passed.items():
            since = self._since.get(rank)
            if since is None or now is None or now[0] <= since[0]:
                return None
            spans.append((now[1] - since[1], now[0] - since[0]))
            latest[rank] = now
        if not spans:
            return None
        self._since = latest
        return Took(max(span / steps for span, steps in spans), min(it[1] for it in spans))
