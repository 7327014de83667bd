"""What goes into an Engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradsum.proto.data import Header
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.table import TensorSpec


@dataclass(frozen=True, slots=True)
class Frame:
    """Event: a data frame of an attached worker."""

    rank: int
    header: Header
    payload: Any


@dataclass(frozen=True, slots=True)
class Records:
    """Event: control records of an attached worker, of the envelope's epoch."""

    rank: int
    epoch: int
    records: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Attached:
    """Event: both connections of a worker are bound, generation as it said."""

    rank: int
    generation: int
    local: bool
    """Whether its shared memory can be read here."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Event: a plan is in force; this server stands at ``index`` in it."""

    plan: Plan
    index: int


@dataclass(frozen=True, slots=True)
class Extend:
    """Event: table entries from ``start`` on."""

    start: int
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Reset:
    """Event: the job is over."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: a deadline may have passed."""


Event = Frame | Records | Attached | Adopt | Extend | Reset | Tick


@dataclass(frozen=True, slots=True)
class SendSum:
    """Action: a sum leaves for a worker's data connection; payload None is header-only."""

    rank: int
    header: Header
    payload: Any


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Action: ask the coordinator for its plan and the table from ``start`` on."""

    start: int


Action = SendSum | FetchPlan
