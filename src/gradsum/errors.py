"""Every error that gradsum raises on purpose.

Rules: the class says whose fault it is; the text names the peer, the tensor and the remedy. A plain
Python error that escapes from gradsum is a bug.
"""

from __future__ import annotations


class GradsumError(Exception):
    """Base class. ``str()`` gives the message and, on a line of its own, the remedy."""

    def __init__(
        self,
        message: str,
        *,
        peer: str | None = None,
        tensor: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.peer = peer
        self.tensor = tensor
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def renew(self) -> GradsumError:
        """A copy to raise in another thread, so that tracebacks do not pile up on one object."""
        return type(self)(self.message, peer=self.peer, tensor=self.tensor, hint=self.hint)


class ConfigError(GradsumError):
    """A flag, variable or file holds a value that cannot be used."""


class UsageError(GradsumError):
    """The call is not allowed now: before init, after shutdown, after fork, a round still open."""


class ProtocolError(GradsumError):
    """A peer sent something that the protocol does not allow."""


class MismatchError(GradsumError):
    """Ranks disagree about a tensor, a parameter set or the number of backward passes."""


class Refused(GradsumError):
    """The coordinator does not let this process in: second job, taken rank, wrong world size."""


class Unreachable(GradsumError):
    """The coordinator or a server does not answer."""


class PeerLost(GradsumError):
    """A member died, left, or raised an error of its own."""


class StallTimeout(GradsumError, TimeoutError):
    """A deadline passed."""


class NotBuilt(GradsumError, NotImplementedError):
    """A policy value that belongs to a later release."""


class NonFinite(GradsumError, FloatingPointError):
    """The NaN guard found a value that is not finite."""
