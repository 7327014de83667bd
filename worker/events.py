"""What goes into a Core and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradsum.errors import GradsumError
from gradsum.proto.data import Header
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.table import TensorSpec
from gradsum.worker.rounds import Flight, Op, Sink


@dataclass(frozen=True, slots=True)
class Submit:
    """Event: the training thread hands over a tensor."""

    op: Op


@dataclass(frozen=True, slots=True)
class SumFrame:
    """Event: a data frame from the server at ``server`` in the plan."""

    server: int
    header: Header
    payload: memoryview | None


@dataclass(frozen=True, slots=True)
class Records:
    """Event: control records from a server."""

    server: int
    epoch: int
    incarnation: int
    records: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Connected:
    """Event: sockets to a server exist, as connection ``generation``."""

    server: int
    generation: int
    local: bool
    """Whether shared memory is offered to the server."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Event: a plan is in force here."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Extend:
    """Event: table entries from ``start`` on."""

    start: int
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Departed:
    """Event: ranks that have left the job; rounds that miss them will never complete."""

    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class FailTensor:
    """Event: operations on this tensor fail (its registration was refused)."""

    name: str
    error: GradsumError


@dataclass(frozen=True, slots=True)
class Pause:
    """Event: at a fence; what is submitted from now on waits for the next plan, or for Resume."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Event: the fence was aborted."""


@dataclass(frozen=True, slots=True)
class Join:
    """Event: ABSENT from here on (E7); legal when nothing is in flight."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Event: acknowledge everything now; this rank is about to leave (E6)."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: a deadline may have passed."""


@dataclass(frozen=True, slots=True)
class SendPush:
    """Action: a PUSH or ABSENT leaves; payload None is header-only.

    What the shell needs to keep until the sum is in, it keeps in ``flight.kept``.
    """

    server: int
    header: Header
    payload: memoryview | None
    flight: Flight


@dataclass(frozen=True, slots=True)
class SendAttach:
    """Action: bind the data connection of this generation."""

    server: int
    generation: int


@dataclass(frozen=True, slots=True)
class Linked:
    """Action: the connection works; ``local``: pushes may be placed in shared memory."""

    server: int
    local: bool


@dataclass(frozen=True, slots=True)
class Deliver:
    """Action: write a piece of a sum; before the Complete of its op."""

    sink: Sink
    offset: int
    payload: memoryview
    members: int
    exponent: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Action: the op is done; its outcome is in the op."""

    op: Op


@dataclass(frozen=True, slots=True)
class Fail:
    """Action: the op will not be done."""

    op: Op
    error: GradsumError


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Action: close the sockets of a server and open new ones (F6).

    ``remote``: the server cannot read our shared memory, never offer it again.
    """

    server: int
    remote: bool = False


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Action: ask the coordinator for its plan and the table from ``start`` on."""

    start: int


Action = SendPush | SendAttach | Linked | Deliver | Complete | Fail | Reconnect | FetchPlan
