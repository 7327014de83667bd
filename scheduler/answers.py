"""Answers given before, so that a request that comes twice is executed once.

Any message can be lost, so members repeat a request with the same ``req`` until it is answered.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

KEEP: Final = 16
"""Answers kept per asker; an asker has one or two requests open at a time."""


class Answers:
    """The last answers per asker (a token, or a routing id for strangers)."""

    __slots__ = ("_askers", "_limit")

    def __init__(self, limit: int = 4096) -> None:
        self._askers: OrderedDict[bytes, OrderedDict[int, Any]] = OrderedDict()
        self._limit = limit

    def get(self, asker: bytes, req: int) -> Any | None:
        """The answer given to this request, or None."""
        mine = self._askers.get(asker)
        return None if mine is None else mine.get(req)

    def keep(self, asker: bytes, req: int, answer: Any) -> Any:
        """Remember and return the answer; the oldest of too many are forgotten."""
        mine = self._askers.setdefault(asker, OrderedDict())
        self._askers.move_to_end(asker)
        mine[req] = answer
        if len(mine) > KEEP:
            mine.popitem(last=False)
        if len(self._askers) > self._limit:
            self._askers.popitem(last=False)
        return answer
