"""F1, F2: what a shard grants. ABSENT and broadcasts must not look like a slow or a fast worker."""

from __future__ import annotations

from typing import Any

from gradsum.proto import data, peer
from gradsum.proto.control import PlanMessage, ServerInfo
from gradsum.proto.data import Header
from gradsum.proto.dtypes import CODES
from gradsum.proto.limits import PROTOCOL
from gradsum.scheduler.credit import Bounds
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import TensorSpec
from gradsum.server.adder import Adder
from gradsum.server.engine import Adopt, Attached, Engine, Extend, Frame

WINDOW, SKEW, NBYTES = 1 << 20, 1 << 12, 1 << 16
SPECS = (
    TensorSpec("sum", "float32", "float32", (NBYTES // 4,), Policy()),
    TensorSpec("root", "float32", "float32", (NBYTES // 4,), Policy("broadcast", 0)),
)


def engine_of(ranks: int) -> Engine:
    """An engine with two tensors and all ranks attached."""
    engine = Engine(bounds=Bounds(WINDOW, SKEW), park_bytes=1 << 20, heartbeat=1e9, adder=Adder())
    members = tuple((rank, 1) for rank in range(ranks))
    plan = PlanMessage(
        "c", "job", 1, members, (ServerInfo(0, 1, "", "", 1.0),), NBYTES, 0, (), 0, 0, 0, (), False,
        (),
    )  # fmt: skip
    engine.step(Adopt(Plan.of(plan), 0), 0.0)
    engine.step(Extend(0, SPECS), 0.0)
    for rank in range(ranks):
        engine.step(Attached(rank, 1, False), 0.0)
    engine.drain(0.0)
    return engine


def push(
    engine: Engine, rank: int, key: int, version: int, offset: int, now: float, absent: bool = False
) -> None:
    """A PUSH or ABSENT of a whole tensor, then what the batch's end brings."""
    kind, length = (data.ABSENT, 0) if absent else (data.PUSH, NBYTES)
    header = Header(
        kind, PROTOCOL, "job", 1, key, 0, version, rank, 1, 1, 1, offset, version, 0,
        CODES["float32"], 0, length, 2, 1, b"", 0,
    )  # fmt: skip
    engine.step(Frame(rank, header, None if absent else bytearray(NBYTES)), now)


def credit(out: dict[int, list[Any]], rank: int) -> peer.Credit | None:
    """The last grant for a rank."""
    found = [record for record in out.get(rank, ()) if isinstance(record, peer.Credit)]
    return found[-1] if found else None


def test_f2_a_rank_that_runs_ahead_is_held_and_let_go_by_itself() -> None:
    engine = engine_of(2)
    push(engine, 1, 0, 1, 100, 0.0)
    push(engine, 0, 0, 1, NBYTES, 0.0)
    push(engine, 0, 0, 2, WINDOW // 2, 0.001)
    held = credit(engine.drain(0.001), 0)
    assert held is not None
    assert held.hold == held.seen == WINDOW // 2
    assert held.limit == held.seen + WINDOW
    free = credit(engine.drain(0.040), 0)
    assert free is not None
    assert free.hold == free.limit


def test_f2_absent_is_as_far_as_a_push() -> None:
    engine = engine_of(2)
    for version in range(1, 9):
        now = version / 1000
        push(engine, 0, 0, version, version * NBYTES, now)
        push(engine, 1, 0, version, version * 256, now, absent=True)
        engine.drain(now)
    push(engine, 1, 0, 9, 9 * 256, 0.009, absent=True)
    push(engine, 0, 0, 9, WINDOW, 0.009)
    grant = credit(engine.drain(0.009), 0)
    assert grant is not None
    assert grant.hold > grant.seen


def test_f2_the_root_of_broadcasts_is_not_ahead_of_its_readers() -> None:
    engine = engine_of(2)
    push(engine, 0, 1, 1, WINDOW // 2, 0.0)
    push(engine, 1, 0, 1, NBYTES, 0.001)
    push(engine, 0, 0, 1, WINDOW, 0.001)
    grant = credit(engine.drain(0.001), 0)
    assert grant is not None
    assert grant.hold > grant.seen
