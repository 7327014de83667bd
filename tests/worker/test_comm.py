"""Whatever ends the comm thread, nobody waits for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gradsum.config import load
from gradsum.errors import GradsumError, ProtocolError
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import TensorSpec
from gradsum.worker.session import Session

SPEC = TensorSpec("x", "float32", "float32", (2,), Policy())


class BrokenCore:
    """A core that fails in the middle of an event."""

    plan = None
    rank = 0
    links = SimpleNamespace(silent=lambda now, limit: [])

    def waiting(self) -> list[Any]:
        return []

    def step(self, event: Any, now: float) -> list[Any]:
        raise ZeroDivisionError("planted")

    def next_deadline(self) -> float:
        return float("inf")


def test_an_error_inside_the_core_settles_the_operation_that_met_it() -> None:
    session = Session(load({"coordinator": "127.0.0.1:9"}, {}, None))
    session._specs[0] = SPEC
    session._comm.core = BrokenCore()  # type: ignore[assignment]
    session._comm.start()
    handle = session.submit(0, 1, memoryview(bytes(8)), None)
    with pytest.raises(ProtocolError, match="planted"):
        handle.wait(5.0)
    with pytest.raises(GradsumError):
        session.submit(0, 2, memoryview(bytes(8)), None)
    session._comm.join(5.0)
    assert not session._comm.is_alive()
