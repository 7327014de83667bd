"""Scenarios over real processes, one module a kind; ``collect`` finds them."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from tests.e2e.stage import Scenario

KINDS: Final = (
    "api_semantics", "backend", "config", "ddp", "dtypes", "habits", "lifecycle", "numerics",
    "ported", "training",
)  # fmt: skip


def collect() -> dict[str, Scenario]:
    """All scenarios by name, in order."""
    found: dict[str, Scenario] = {}
    for kind in KINDS:
        for act in vars(import_module(f"{__name__}.{kind}")).values():
            for each in getattr(act, "scenarios", ()):
                found[each.name] = each
    return found
