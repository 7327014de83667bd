"""Session: one process's membership of one job, as the training threads see it.

Every method may be called from any thread; what needs a socket is handed to the comm thread. Every
wait has a deadline, and a failure of the job ends all of them with the same error.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from gradsum.config import Settings
from gradsum.errors import ConfigError, GradsumError, StallTimeout, UsageError
from gradsum.proto import control
from gradsum.proto.address import parse_address
from gradsum.proto.codec import pack, unpack
from gradsum.proto.limits import MAX_GATHER, PROTOCOL
from gradsum.proto.transport.memory import keep_freed_memory
from gradsum.proto.transport.shared import SharedMemory
from gradsum.scheduler.policy import SUM, require_built
from gradsum.scheduler.table import NAME_HINT, TensorSpec, name_error
from gradsum.trace import Trace
from gradsum.worker import core as protocol
from gradsum.worker.comm import Comm, Condition
from gradsum.worker.fence import Gate
from gradsum.worker.handle import Handle, Ticket
from gradsum.worker.membership import Membership
from gradsum.worker.rounds import Op, Sink
from gradsum.worker.timeline import Timeline, WatchedHandle

log = logging.getLogger("gradsum.worker")

REGISTER_AT_ONCE = 2_000
"""Tensors in one request, so that it stays below the limit of control messages."""

SETTLE = 2.0
"""Seconds that a leaver waits for its last sums to become stable (E6)."""


class Session:
    """Open with ``Session.open``; ``rank`` and ``size`` are the coordinator's word."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank = -1
        self.size = 0
        self.local_rank = settings.local_rank
        self.local_size = settings.local_size
        self.closed = False
        self.joined = False
        self.pack_bytes = 0
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._gate = Gate()
        self._release = threading.Event()
        self._ready = threading.Event()
        self._failure: GradsumError | None = None
        self._refused: dict[str, GradsumError] = {}  # by tensor name
        self._specs: dict[int, TensorSpec] = {}
        self._turns: dict[str, int] = {}
        self._groups = 0
        self._firings: dict[str, dict[int, int]] = {}
        self._tickets: set[Ticket] = set()
        self._called = time.monotonic()
        self._passed = (0, self._called)  # the last fence point: its number, when it was reached
        self._speed = (0.0, 0)
        if settings.coordinator is None:
            raise ConfigError(
                "no coordinator address",
                hint="set GRADSUM_COORDINATOR=HOST:PORT, or start with: gradsum launch",
            )
        address = parse_address(settings.coordinator, "coordinator")
        trace = Trace.of(settings.trace, "worker")
        self.timeline = None if trace is None else Timeline(trace)
        self.memory = SharedMemory(settings.transport != "tcp")
        hello = control.Hello(
            PROTOCOL, "worker", settings.job, settings.rank, settings.world_size,
            socket.gethostname(), self._pid, settings.restart_count, "", "", b"",
            self.memory.home,
        )  # fmt: skip
        self._membership = Membership(hello, str(address), settings.connect_timeout)
        self._comm = Comm(self, self._membership, address)

    @classmethod
    def open(cls, settings: Settings) -> Session:
        """Join the job: blocks until all members are there.

        Raises Unreachable, Refused or StallTimeout, each naming the address or who is missing.
        """
        keep_freed_memory()
        session = cls(settings)
        session._comm.start()
        if not session._ready.wait(settings.start_timeout + 10.0):
            session._comm.stop()
            raise StallTimeout(
                f"the job did not start in {settings.start_timeout:g} s",
                hint="gradsum status shows who is missing",
            )
        if session._failure is not None:
            session._end()
            raise session._failure.renew()
        return session

    # -- tensors ------------------------------------------------------------------------------

    def register(self, specs: Sequence[TensorSpec], group: str = "") -> list[int]:
        """The keys of tensors by name; blocking, one round trip.

        Raises MismatchError with both sides when ranks disagree, NotBuilt for a policy of later.
        """
        self.check()
        for spec in specs:
            require_built(spec.policy, spec.name)
            wrong = name_error(spec.name)
            if wrong:
                raise UsageError(wrong, hint=NAME_HINT)
        keys: list[int] = []
        for start in range(0, max(len(specs), 1), REGISTER_AT_ONCE):
            part = tuple(specs[start : start + REGISTER_AT_ONCE])
            last = start + REGISTER_AT_ONCE >= len(specs)
            message = control.Register(0, group, part, last)
            keys += self._ask(message, f"registering {len(part)} tensors")
        with self._lock:
            self._specs.update(zip(keys, specs, strict=True))
        return keys

    def submit(
        self, key: int, version: int, source: memoryview | None, sink: Sink | None,
        priority: int = 0,
    ) -> Handle:  # fmt: skip
        """Push and pull one version of a tensor; returns at once.

        source: flat bytes that stay valid and unchanged until the handle is done; None is ABSENT,
        or for a broadcast a reader. priority: smaller is more urgent.
        """
        self.check()
        spec = self._specs[key]
        if self.joined and spec.policy.kind == SUM:
            raise UsageError(
                f"tensor {spec.name!r}: this rank has joined and pushes no more", tensor=spec.name
            )
        if source is not None and source.nbytes != spec.nbytes:
            raise UsageError(
                f"tensor {spec.name!r}: {source.nbytes} bytes given, {spec.nbytes} registered",
                tensor=spec.name,
            )
        op = Op(key, spec.name, version, source, sink, priority)
        handle = op.handle = self._handle(op)
        self._called = time.monotonic()
        self._comm.submit(op)
        if self._failure is not None:  # it came meanwhile: nobody will settle this one
            handle.finish(self._failure)
        return handle

    def _handle(self, op: Op) -> Handle:
        timeout, timeline = self.settings.stall_timeout, self.timeline
        return Handle(op, timeout) if timeline is None else WatchedHandle(op, timeout, timeline)

    # -- all ranks together -------------------------------------------------------------------

    def gather(self, tag: str, value: Any) -> dict[int, Any]:
        """Every rank's value by rank (msgpack types, at most 64 KiB); blocking."""
        self.check()
        packed = pack(value)
        if len(packed) > MAX_GATHER:
            raise UsageError(f"gather {tag!r}: {len(packed)} bytes, limit {MAX_GATHER}")
        with self._lock:
            turn = self._turns[tag] = self._turns.get(tag, 0) + 1
        found = self._ask(control.Gather(0, tag, turn, packed), f"gather {tag!r}")
        return {rank: unpack(raw) for rank, raw in found.items()}

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather("barrier", None)

    def report_window(self, group: str, counts: dict[int, int], order: list[int]) -> None:
        """Tell the coordinator what window 1 of an optimizer showed (V4, E8)."""
        self.check()
        message = control.WindowReport(group, counts, tuple(order))
        self._comm.post(lambda now: self._membership.outbox.append(message))

    def firings(self, group: str) -> dict[int, int] | None:
        """Hook firings a window, merged over the ranks; None until all have reported."""
        self.check()
        return self._firings.get(group)

    def mark_step(self) -> None:
        """A fence point; blocks while a planned epoch begins here (E1)."""
        self.check()
        self._called = time.monotonic()
        with self._lock:
            if not self._gate.waiting:
                self._release = threading.Event()  # one a fence: the last may still be awaited
            held = self._gate.arrive()
            self._passed = (self._gate.step, self._called)
            if not held:
                return
            release = self._release
        self.check()  # a failure that came before the lock has set an older event
        self._comm.post(lambda now: None)
        if not release.wait(self.settings.stall_timeout):
            raise StallTimeout(
                f"fence at step {self._gate.step}: not all ranks came in "
                f"{self.settings.stall_timeout:g} s",
                hint="all ranks must take the same number of steps; see gradsum status",
            )
        self.check()

    def join(self) -> int:
        """This rank has no more data (E7); blocks until all ranks have joined.

        The others go on meanwhile, dividing by the world size. Returns the last rank to join.
        """
        self.check()
        self._wait_until(lambda core: core.idle(), self.settings.stall_timeout, "open rounds")
        self.joined = True
        ticket = self._request(control.Joined(0), "join")  # before any round goes on without us
        self._comm.post(lambda now: self._comm.feed(protocol.Join(), now))
        found = self._answer(ticket)
        return int(next(iter(found)))

    def next_group(self, kind: str = "opt") -> str:
        """A name for the next optimizer or model, the same on every rank: "opt0", "opt1", ..."""
        with self._lock:
            self._groups += 1
            return f"{kind}{self._groups - 1}"

    def speed(self) -> tuple[int, float]:
        """Wall time in ms and MB/s of pushed bytes since the last call."""
        pushed = self._comm.core.counters["pushed"] if self._comm.core else 0
        now, (then, before) = time.monotonic(), self._speed
        self._speed = (now, pushed)
        rate = 0.0 if then == 0.0 else (pushed - before) / max(now - then, 1e-9) / 1e6
        return int(time.time() * 1000), rate

    def info(self) -> dict[str, Any]:
        """Counters for status, and how payloads travel."""
        counters: dict[str, Any] = dict(self._comm.core.counters) if self._comm.core else {}
        links = {str(server): how for server, how in self.transports().items()}
        rates = self._comm.core.uplink.describe() if self._comm.core else {}
        return counters | rates | {"links": links, "passed": self._passed}

    @property
    def sharing(self) -> bool:
        """Whether servers of this host read this process's memory."""
        return self.memory.active

    def buffer(self, nbytes: int) -> memoryview:
        """Writable memory for what is pushed, shared with servers of this host if any."""
        return self.memory.allocate(nbytes)

    def transports(self) -> dict[int, str]:
        """How payloads travel, by server: "shm" or "tcp"."""
        return self._comm.transports()

    # -- ends ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the job's failure, or UsageError after shutdown or in a forked child."""
        if self.closed:
            raise UsageError("gradsum has been shut down", hint="call gradsum.init() again")
        if self._failure is not None:
            raise self._failure.renew()
        if os.getpid() != self._pid:
            raise UsageError(
                "gradsum was initialised in another process (fork)",
                hint="call gradsum.init() after the fork, or start workers by spawn",
            )

    def fail(self, error: GradsumError) -> None:
        """The job is over for this process: everything that waits gets ``error``."""
        with self._lock:
            if self._failure is None:
                self._failure = error
        self._settle(error)

    def _settle(self, error: GradsumError) -> None:
        self._comm.settle(error)
        for ticket in list(self._tickets):
            ticket.reject(error)
        self._ready.set()
        self._release.set()

    def abort(self, message: str) -> None:
        """Tell the others that this process ends by an error of its own, and stop."""
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        if self._failure is None:
            self._comm.post(lambda now: self._membership.outbox.append(control.Abort(message)))
        self._end()

    def close(self) -> None:
        """Leave in peace (E6); a second call does nothing."""
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        if self._failure is None:
            self._leave()
        self._end()

    def _leave(self) -> None:
        self._comm.post(lambda now: self._comm.feed(protocol.Settle(), now))
        try:
            self._wait_until(lambda core: core.settled(), SETTLE, "the last sums")
        except GradsumError as error:
            log.info("leaving while %s", error.message)
        self._comm.post(self._membership.leave)
        try:
            self._wait_until(
                lambda core: self._membership.gone, self.settings.shutdown_timeout, "goodbye"
            )
        except GradsumError as error:
            log.warning("%s", error.message)

    def _end(self) -> None:
        self._comm.stop()
        self._comm.join(self.settings.shutdown_timeout)
        hint = "wait for what other threads do before shutdown()"
        self._settle(UsageError("gradsum was shut down meanwhile", hint=hint))
        if self.timeline is not None:
            self.timeline.trace.write()

    # -- waiting ------------------------------------------------------------------------------

    def _ask(self, message: Any, what: str) -> Any:
        return self._answer(self._request(message, what))

    def _request(self, message: Any, what: str) -> Ticket:
        ticket = Ticket(what)
        self._tickets.add(ticket)
        self._comm.post(lambda now: self._membership.ask(message, ticket, now))
        return ticket

    def _answer(self, ticket: Ticket) -> Any:
        try:
            if self._failure is not None:
                raise self._failure.renew()
            return ticket.wait(self.settings.stall_timeout)
        finally:
            self._tickets.discard(ticket)

    def _wait_until(self, condition: Condition, limit: float, what: str) -> None:
        """Wait until ``condition(core)`` holds on the comm thread."""
        ticket = Ticket(what)
        self._tickets.add(ticket)
        self._comm.watch(condition, ticket)
        if self._failure is not None:
            ticket.reject(self._failure)
        try:
            ticket.wait(limit)
        finally:
            self._tickets.discard(ticket)

    # -- called by the comm thread ------------------------------------------------------------

    @property
    def step(self) -> int:
        """Fence points passed."""
        return self._gate.step

    def idle_for(self, now: float) -> float:
        """Seconds since the training thread last called."""
        return max(now - self._called, 0.0)

    def ready(self, plan: control.PlanMessage) -> None:
        """A plan is in force."""
        welcome = self._membership.welcome
        if welcome is not None:
            self.rank, self.size = welcome.rank, welcome.world
            if self.timeline is not None:
                self.timeline.trace.number = welcome.rank
        if not self._ready.is_set():
            self.pack_bytes = plan.pack_bytes
        self._ready.set()

    def hear(self, text: str) -> None:
        """The coordinator says for whom it waits; a timeout will repeat it."""
        for ticket in list(self._tickets):
            ticket.awaited = text

    def refuse(self, name: str, error: GradsumError) -> None:
        """Operations on this tensor fail from now on: ranks disagree about it (I1)."""
        self._refused[name] = error

    def refused(self, name: str) -> GradsumError | None:
        """Why operations on this tensor fail, if they do."""
        return self._failure or self._refused.get(name)

    def firings_known(self, group: str, counts: dict[int, int]) -> None:
        """The ranks' reports are merged."""
        self._firings[group] = counts

    def announce(self, fence: control.Fence) -> bool:
        """A fence lies ahead; False when this rank is past it."""
        with self._lock:
            ok, release = self._gate.announce(fence)
            if release:
                self._release.set()
        return ok

    def fence_number(self) -> int:
        """The latest fence this worker knows of."""
        return self._gate.number

    def at_fence(self) -> int:
        """The number of the fence where the training thread waits, or 0."""
        with self._lock:
            fence = self._gate.fence
            return fence.number if self._gate.waiting and fence is not None else 0

    def pass_fence(self, number: int) -> None:
        """GO, or its abort."""
        with self._lock:
            if self._gate.open(number):
                self._release.set()
