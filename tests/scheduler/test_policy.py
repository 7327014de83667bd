"""Policies: who writes, who reads, and the refusal of what is not built."""

from __future__ import annotations

from typing import Any

import pytest

from gradsum.errors import NotBuilt
from gradsum.scheduler.policy import Policy, require_built


def test_everybody_writes_and_reads_a_sum() -> None:
    assert all(Policy().writes(rank) and Policy().reads(rank) for rank in range(5))


def test_the_root_writes_a_broadcast_and_the_others_read_it() -> None:
    policy = Policy("broadcast", 2)
    assert [policy.writes(rank) for rank in range(4)] == [False, False, True, False]
    assert [policy.reads(rank) for rank in range(4)] == [True, True, False, True]


@pytest.mark.parametrize("policy", [Policy(), Policy("broadcast", 3), Policy(pack="opt7")])
def test_what_is_built_passes(policy: Policy) -> None:
    require_built(policy, "w")


@pytest.mark.parametrize(
    "change", [{"kind": "gather"}, {"window": 4}, {"slack": 1}, {"op": "state"}, {"route": "peer"}]
)
def test_what_is_not_built_is_refused_by_field_value_and_tensor(change: dict[str, Any]) -> None:
    (field, value), *_ = change.items()
    with pytest.raises(NotBuilt) as raised:
        require_built(Policy()._replace(**change), "layer.weight")
    assert f"{field}={value!r}" in raised.value.message
    assert "layer.weight" in raised.value.message
    assert raised.value.tensor == "layer.weight"
    assert f"use {field}=" in str(raised.value)
