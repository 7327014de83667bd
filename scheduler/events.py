"""What goes into the coordinator's state machine and what comes out of it.

Rules: a peer is a routing id, never an identity (I2); identity is what Hello bound to it. ``now``
is handed in beside each event, in seconds of any monotonic clock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gradsum.scheduler.record import Record


class Received(NamedTuple):
    """A decoded control message."""

    peer: bytes
    message: Any


class Disconnected(NamedTuple):
    """The connection of this routing id is closed."""

    peer: bytes


class Tick(NamedTuple):
    """A deadline has passed."""


class Stop(NamedTuple):
    """This process is told to end; the text says by what."""

    reason: str


class Send(NamedTuple):
    """Send a control message."""

    peer: bytes
    message: Any


class Log(NamedTuple):
    """A line for the log; level is a name of the standard library's. Lines of one key, which
    strangers can cause, are logged at a limited rate."""

    level: str
    text: str
    key: str = ""


class Junk(NamedTuple):
    """A message that means nothing here: counted, logged at a limited rate, answered by nobody."""

    peer: bytes
    text: str


class JobOver(NamedTuple):
    """The job has ended; the coordinator takes the next one."""

    failed: bool


class Learnt(NamedTuple):
    """Keep what the tuner has found, to be tried first by the next such job."""

    record: Record


Event = Received | Disconnected | Tick | Stop
Action = Send | Log | Junk | JobOver | Learnt
