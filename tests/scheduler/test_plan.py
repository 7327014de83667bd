"""Plan: look-ups of a PlanMessage, clocks at the fence, the layout it stands for."""

from __future__ import annotations

import pytest

from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import Table
from tests.sim.build import plan, spec


def table() -> Table:
    result = Table()
    result.append(spec("a", 600))
    result.append(spec("b", 4, first=5))
    return result


def test_lookups() -> None:
    one = plan(workers=3, servers=2, epoch=4)
    assert (one.epoch, one.job, len(one.servers)) == (4, "j", 2)
    assert dict(one.members) == {0: 10, 1: 11, 2: 12}
    assert one.tokens[2] == b"token2"


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        plan().members[9] = 9  # type: ignore[index]


def test_v3_clocks_start_at_the_fence_or_before_the_first_version() -> None:
    known = table()
    assert [plan().base(key, known) for key in (0, 1)] == [0, 4]
    later = plan(versions=((0, 12),))
    assert [later.base(key, known) for key in (0, 1)] == [12, 4]


def test_the_layout_follows_slice_bytes_weights_and_packing() -> None:
    layout = plan(servers=2).layout(table())
    assert [(s.length, s.server) for s in layout.units[0].slices] == [
        (1024, 0), (1024, 1), (352, 0)
    ]  # fmt: skip
    packed = Table()
    for name in "ab":
        packed.append(spec(name, 4, policy=Policy(pack="g")))
    one = plan(pack_bytes=64, packing=(1, 0), packed=2).layout(packed)
    assert [member.key for member in one.units[1].members] == [1, 0]
