"""Handles: what the training thread waits on. Settled once; later attempts change nothing."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from gradsum.errors import GradsumError, StallTimeout
from gradsum.worker.rounds import Op, Outcome


class Ticket:
    """The result of one request, handed from the comm thread to a waiting thread."""

    __slots__ = ("_done", "awaited", "error", "value", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.awaited = ""  # what the coordinator last said of whom it waits for
        self.value: Any = None
        self.error: GradsumError | None = None
        self._done = threading.Event()

    def resolve(self, value: Any) -> None:
        """Settle with a value, unless it is settled."""
        if self._done.is_set():
            return
        self.value = value
        self._done.set()

    def reject(self, error: GradsumError) -> None:
        """Settle with an error, unless it is settled."""
        if self._done.is_set():
            return
        self.error = error
        self._done.set()

    def done(self) -> bool:
        """Whether it is settled."""
        return self._done.is_set()

    def wait(self, timeout: float) -> Any:
        """The value. Raises the error that ended it, or StallTimeout after ``timeout`` seconds."""
        if not self._done.wait(timeout):
            raise StallTimeout(
                f"{self.what}: not done in {timeout:g} s" + (self.awaited and f"; {self.awaited}"),
                hint="all ranks must do the same; see gradsum status",
            )
        if self.error is not None:
            raise self.error.renew()
        return self.value


class Handle:
    """A submitted tensor on its way. A bare lock is its event: thousands are made in a step."""

    __slots__ = ("_done", "_error", "_open", "_tell", "_timeout", "op")

    def __init__(self, op: Op, timeout: float) -> None:
        self.op = op
        self._timeout = timeout
        self._error: GradsumError | None = None
        self._done = False
        self._tell: deque[Callable[[], None]] | None = None
        self._open = threading.Lock()
        self._open.acquire()

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.op.name

    def finish(self, error: GradsumError | None = None) -> None:
        """Settle, unless it is settled; called by the comm thread or after its end."""
        if self._done:
            return
        self._error = error
        self._done = True
        self._let_go()
        self._tell_all()

    def tell(self, call: Callable[[], None]) -> None:
        """Have ``call()`` run once it is settled: by the thread that settles it, or now. Such a
        handle is ended by the comm thread after its timeout, since nobody waits on it here."""
        self._tell = deque([call])
        if self._done:
            self._tell_all()

    def _tell_all(self) -> None:
        """Both threads may come here; a deque hands each call to one of them."""
        while self._tell:
            with contextlib.suppress(IndexError):
                self._tell.popleft()()

    def overdue(self, now: float) -> GradsumError | None:
        """The error that ends it if it is to tell somebody and its time is over."""
        late = self._tell is not None and now - self.op.since > self._timeout
        return self._stalled(self._timeout) if late else None

    def _stalled(self, limit: float) -> StallTimeout:
        return StallTimeout(
            f"tensor {self.op.name!r} version {self.op.version} is not complete after "
            f"{limit:g} s: {lacking(self.op)}",
            tensor=self.op.name,
            hint="all ranks must push the same tensors equally often",
        )

    def _let_go(self) -> None:
        with contextlib.suppress(RuntimeError):  # open already: two threads ended it at once
            self._open.release()

    def done(self) -> bool:
        """Whether the result is there, or an error."""
        return self._done

    def wait(self, timeout: float | None = None) -> Outcome:
        """Block until the sum is in.

        Raises what ended the round, or StallTimeout after ``timeout`` seconds (default: the
        setting stall_timeout), naming the tensor and the ranks that are missing.
        """
        limit = self._timeout if timeout is None else timeout
        if not self._done:
            if not self._open.acquire(timeout=min(limit, threading.TIMEOUT_MAX)):
                raise self._stalled(limit)
            self._let_go()
        if self._error is not None:
            raise self._error.renew()
        return self.op.outcome


def lacking(op: Op) -> str:
    """Who an operation waits for, as far as the servers have said."""
    if op.missing is None:
        return "no server has said yet who is missing"
    if not op.missing:
        return "no rank has pushed it yet"
    return "waiting for " + ", ".join(f"rank {rank}" for rank in op.missing)
