"""Tests of PyTorch's that pass with gloo and cannot pass with gradsum, and why."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_BY_NAME: Final = "torch lets only a backend whose name is gloo have monitored_barrier()"

EXCEPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(
        (
            "test_monitored_barrier_failure_order",
            "test_monitored_barrier_gloo",
            "test_monitored_barrier_gloo_subgroup",
            "test_monitored_barrier_wait_all_ranks",
        ),
        _BY_NAME,
    )
)
