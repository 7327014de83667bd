"""What the torch front end sees of a session: names and types only, nothing runs here.

The networked session, the local one and the tests' in-process cluster all have this face, so the
front end never asks which of them it talks to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gradsum.config import Settings
from gradsum.scheduler.table import TensorSpec
from gradsum.worker.rounds import Outcome, Sink


class Handle(Protocol):
    """One rank's part in one round."""

    @property
    def name(self) -> str:
        """The tensor's name."""

    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""

    def wait(self, timeout: float | None = None) -> Outcome:
        """Block until the round is over; raises what ended it, StallTimeout after ``timeout`` s."""

    def tell(self, call: Callable[[], None]) -> None:
        """Have ``call()`` run when ``wait`` would return at once: by the session's thread, or now.

        It must not raise, and take no longer than a sink. The round ends by stall_timeout.
        """


class Session(Protocol):
    """A member of a job. All calls are allowed from any thread of the process that opened it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    settings: Settings
    closed: bool

    @property
    def pack_bytes(self) -> int:
        """Tensors below this size may share a buffer; the same on all ranks."""

    @property
    def sharing(self) -> bool:
        """Whether servers of this host read this process's memory."""

    def buffer(self, nbytes: int) -> memoryview:
        """Writable memory for what is pushed, shared with servers of this host if any."""

    def transports(self) -> dict[int, str]:
        """How payloads travel, by server: "shm" or "tcp"."""

    def register(self, specs: Sequence[TensorSpec], group: str = "") -> list[int]:
        """Keys of the names (I1). The names of a non-empty group are compared between ranks."""

    def submit(
        self,
        key: int,
        version: int,
        source: memoryview | None,
        sink: Sink | None,
        priority: int = 0,
    ) -> Handle:
        """Queue one round: ``source`` None is ABSENT, or the reader of a broadcast.

        The bytes stay valid until the handle is done. A sink may write where ``source`` lies: a
        piece of the sum arrives only after the same piece was counted. Smaller priority is more
        urgent.
        """

    def gather(self, tag: str, value: Any) -> dict[int, Any]:
        """Every rank's msgpack value, 64 KiB at most."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def report_window(self, group: str, counts: dict[int, int], order: list[int]) -> None:
        """What window 1 taught: firings per key and the keys in ready order (V4, E8)."""

    def firings(self, group: str) -> dict[int, int] | None:
        """Firings per key over all ranks; None until every rank has reported."""

    def mark_step(self) -> None:
        """A fence point (E1)."""

    def join(self) -> int:
        """Leave the rounds (E7); returns the last rank that joined."""

    def next_group(self, kind: str = "opt") -> str:
        """A name for the next optimizer or model of this kind, in creation order."""

    def speed(self) -> tuple[int, float]:
        """(time in ms, MB/s over the last interval)."""

    def abort(self, message: str) -> None:
        """Tell the job that this rank failed."""

    def close(self) -> None:
        """Leave politely (E6)."""

    def check(self) -> None:
        """Raise the session's failure; UsageError when closed or forked."""
