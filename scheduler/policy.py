"""Policy: who adds a tensor, when its sum counts and by which route it travels (DESIGN 1).

A policy is data in the plan, never a separate code path. Values that later releases will bring are
refused here, by field and value, so that no job starts on a promise nobody keeps.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gradsum.errors import NotBuilt

SUM: Final = "sum"
BROADCAST: Final = "broadcast"


class Policy(NamedTuple):
    """The domain, clock, operation and route of one tensor.

    kind "sum": all ranks write and read. kind "broadcast": ``root`` writes, the others read.
    pack: tensors of one packing group may share a buffer; "" is never packed.
    """

    kind: str = SUM
    root: int = -1
    window: int = 1
    slack: int = 0
    op: str = "round"
    route: str = "service"
    pack: str = ""

    def writes(self, rank: int) -> bool:
        """Whether the rank owes a contribution to each round."""
        return self.kind == SUM or rank == self.root

    def reads(self, rank: int) -> bool:
        """Whether the rank is owed each round's sum."""
        return self.kind == SUM or rank != self.root


_BUILT: Final[dict[str, tuple[object, ...]]] = {
    "kind": (SUM, BROADCAST),
    "window": (1,),
    "slack": (0,),
    "op": ("round",),
    "route": ("service",),
}


def require_built(policy: Policy, tensor: str) -> None:
    """Raise NotBuilt for a value that this release refuses, naming field, value and tensor."""
    for field, built in _BUILT.items():
        value = getattr(policy, field)
        if value not in built:
            raise NotBuilt(
                f"policy {field}={value!r} of tensor {tensor!r} is not built yet",
                tensor=tensor,
                hint=f"use {field}={' or '.join(repr(b) for b in built)}",
            )
