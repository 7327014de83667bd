"""Timeline: what the comm thread's frames and the training threads' waits tell the trace.

It looks at what passes between the sockets and the core and changes nothing. A slice is ``queue``
from its submission until it leaves, ``push`` until its receipt, and ``sum`` until its sum is
written. A sum that overtakes the receipt ends the push, since it says the same. A slice that is
sent again stays one push: its arrow begins where the first copy left.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

from gradsum.proto import peer
from gradsum.trace import Flow, SliceArgs, Span, Trace, WaitArgs, arrow
from gradsum.worker.core import Core
from gradsum.worker.events import SendPush, SumFrame
from gradsum.worker.handle import Handle
from gradsum.worker.rounds import Op, Outcome

Slice = tuple[int, int, int]
"""Key, slice and version."""


class _Push(NamedTuple):
    """A slice that has left; ``received`` is when its receipt came."""

    name: str
    left: float
    args: SliceArgs
    arrow: str
    reads: bool
    received: float | None = None


class Timeline:
    """Owned by the comm thread; only ``waited`` is called by others."""

    def __init__(self, trace: Trace, clock: Callable[[], float] = time.monotonic) -> None:
        self.trace = trace
        self._clock = clock
        self._open: dict[Slice, _Push] = {}

    def leaves(self, push: SendPush, run: str) -> None:
        """A push is about to be handed to its socket."""
        header, round_ = push.header, push.flight.round
        name = (header.key, header.slice, header.version)
        if name in self._open or not round_.ops:  # a repetition
            return
        now = self._clock()
        args = SliceArgs(*name, header.rank, header.length, header.priority, push.server,
                         header.epoch)  # fmt: skip
        tensor = round_.ops[0].name
        since = max(op.since for op in round_.ops)
        self.trace.add(Span("queue", tensor, since, now, args))
        reads = round_.stream.unit.policy.reads(header.rank)
        ident = arrow(run, header.incarnation, args, header.rank, "push")
        self._open[name] = _Push(tensor, now, args, ident, reads)

    def heard(self, records: Iterable[Any]) -> None:
        """Control records came; the receipts among them end pushes."""
        now = self._clock()
        for record in records:
            if isinstance(record, peer.Receipt):
                name = (record.key, record.slice, record.version)
                push = self._open.get(name)
                if push is not None and push.received is None:
                    self._pushed(push, now)
                    self._open[name] = push._replace(received=now)
                    if not push.reads:  # the root of a broadcast awaits no sum
                        del self._open[name]

    def _pushed(self, push: _Push, now: float) -> None:
        flow = Flow("s", push.left, "push", push.arrow)
        self.trace.add(Span("push", push.name, push.left, now, push.args, flow))

    def takes(self, event: SumFrame, core: Core, run: str, feed: Callable[[Any], None]) -> None:
        """Feed a sum; it counts if the core does not ignore it."""
        arrived, ignored = self._clock(), core.counters["ignored"]
        feed(event)
        if core.counters["ignored"] != ignored:
            return
        header = event.header
        args = SliceArgs(header.key, header.slice, header.version, header.rank, header.length,
                         header.priority, event.server, header.epoch)  # fmt: skip
        push = self._open.pop((header.key, header.slice, header.version), None)
        start = arrived  # a reader of a broadcast has pushed nothing
        if push is not None and push.received is not None:
            start = push.received
        elif push is not None:
            self._pushed(push, arrived)
        name = core.table[header.key].name
        flow = Flow(
            "f", arrived, "sum", arrow(run, header.incarnation, args, header.rank, "sum")
        )
        self.trace.add(Span("sum", name, start, self._clock(), args, flow))

    def waited(self, op: Op, start: float) -> None:
        """A training thread has waited for an operation since ``start``; any thread."""
        nbytes = 0 if op.source is None else op.source.nbytes
        args = WaitArgs(op.key, op.version, nbytes, op.priority)
        self.trace.add(Span("wait", op.name, start, self._clock(), args))


class WatchedHandle(Handle):
    """A handle whose waits are seen."""

    __slots__ = ("_timeline",)

    def __init__(self, op: Op, timeout: float, timeline: Timeline) -> None:
        super().__init__(op, timeout)
        self._timeline = timeline

    def wait(self, timeout: float | None = None) -> Outcome:
        """As Handle's; one that blocks is recorded."""
        if self.done():
            return super().wait(timeout)
        start = time.monotonic()
        try:
            return super().wait(timeout)
        finally:
            self._timeline.waited(self.op, start)


def write_on_sigterm(trace: Trace) -> None:
    """Let SIGTERM end this process as before, after the file is written; a program that handles
    the signal itself ends in its own way, and Python's exit writes the file."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def end(number: int, frame: FrameType | None) -> None:
        trace.write()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
