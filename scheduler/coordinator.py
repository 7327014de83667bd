"""The coordinator process: sockets, clock and signals around CoordinatorCore.

Rules: one ROUTER, read until it is empty at every wake-up, since its descriptor is edge-triggered
and a send may swallow the edge; a closed connection is an event only after what was received before
it; what cannot be delivered is a closed connection too. Junk is counted and logged at a limited
rate, and harms nobody.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import psutil
import zmq

from gradsum.config import Settings
from gradsum.errors import ConfigError, ProtocolError
from gradsum.log import RateLimited
from gradsum.proto.address import is_loopback
from gradsum.proto.codec import unpack
from gradsum.proto.control import CONTROL, Hello
from gradsum.proto.limits import MAX_RANKS, PROTOCOL
from gradsum.proto.transport.closings import Closings
from gradsum.proto.transport.sockets import CONTROL_LIMIT, Context, bind_router, new_context
from gradsum.scheduler.core import CoordinatorCore, Phase
from gradsum.scheduler.events import (
    Disconnected,
    Event,
    JobOver,
    Junk,
    Learnt,
    Log,
    Received,
    Send,
    Stop,
    Tick,
)
from gradsum.scheduler.job import Config
from gradsum.scheduler.schedule import SCHEDULES
from gradsum.scheduler.tunefile import TuneFile
from gradsum.scheduler.uplink import START

BATCH: Final = 256
"""Messages between two looks at the clock and the signals."""

PATIENCE: Final = 100
"""Full batches until deadlines count again. After a pause of this process (stopped, swapped) the
heartbeats that wait must be read before anybody is called silent."""

LINGER_MS: Final = 1000
"""How long the last messages may take to go out."""

_LOG = logging.getLogger("gradsum.coordinator")


def run(
    settings: Settings,
    host: str,
    port: int,
    workers: int,
    servers: int,
    once: bool,
    port_file: Path | None = None,
) -> int:
    """Serve until told to stop, or with ``once`` until the first job has ended.

    Returns the exit code: 0, 1 for a job that failed or was cut off, 130 when interrupted.
    Raises ConfigError when the address cannot be bound or the numbers make no sense.
    """
    kept = TuneFile(Path(settings.tune_file)) if settings.tune and settings.tune_file else None
    config = config_of(settings, workers, servers, kept)
    context = new_context()
    try:
        shell = _Shell(context, settings, host, port, config, once, kept)
        try:
            return _loop(lambda: shell.serve(port_file))
        finally:
            shell.close()
    finally:
        context.term()


def config_of(
    settings: Settings, workers: int, servers: int, kept: TuneFile | None = None
) -> Config:
    """The core's configuration; ConfigError unless there is at least one of each."""
    for name, value in (("workers", workers), ("servers", servers)):
        if value < 1:
            raise ConfigError(f"--{name} {value}", hint=f"a job has at least one of its {name}")
        if value > MAX_RANKS:
            raise ConfigError(f"--{name} {value}", hint=f"at most {MAX_RANKS}")
    fixed = SCHEDULES[settings.schedule].slice_bytes
    limit = settings.max_job_bytes or servers * psutil.virtual_memory().total * 3 // 4
    return Config(
        workers=workers,
        servers=servers,
        slice_bytes=settings.slice_bytes or fixed or START,
        auto_slices=settings.slice_bytes is None and fixed is None,
        pack_bytes=settings.pack_bytes,
        tune=settings.tune,
        learnt={key: it.setting for key, it in (kept.records if kept else {}).items()},
        deterministic=settings.deterministic,
        heartbeat=settings.heartbeat,
        suspect=settings.suspect,
        lease=settings.lease,
        start_timeout=settings.start_timeout,
        stall_warning=settings.stall_warning,
        max_tensors=settings.max_tensors,
        max_job_bytes=limit,
    )


def decode(data: bytes | memoryview) -> Any:
    """A control message; a Hello of another protocol version keeps that version and nothing else.

    Its fields may differ from ours, yet the answer must name both versions. ProtocolError for junk.
    """
    value = unpack(data)
    if isinstance(value, tuple) and len(value) > 1 and value[0] == "Hello":
        version = value[1]
        if type(version) is int and version != PROTOCOL:
            return Hello(version, "", "", None, None, "", 0, 0, "", "", b"")
    return CONTROL.build(value)


def _loop(serve: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run the coroutine on uvloop where there is one."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        factory = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        _LOG.info("uvloop is not installed; using asyncio's own loop")
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(serve())


class _Shell:
    """The socket, the timer and the signals of one coordinator."""

    def __init__(
        self, context: Context, settings: Settings, host: str, port: int, config: Config,
        once: bool, kept: TuneFile | None,
    ) -> None:  # fmt: skip
        self._router, self._address = bind_router(
            context,
            host,
            port,
            max_message=CONTROL_LIMIT,
            insecure=settings.insecure,
            heartbeat=settings.heartbeat,
        )
        self._closings = Closings(self._router)
        if not is_loopback(self._address.host):
            _LOG.warning("listening on %s without authentication (--insecure)", self._address)
        self._config = config
        self._once = once
        self._kept = kept
        self._core = CoordinatorCore(config, secrets.token_hex(8), lambda: secrets.token_bytes(16))
        self._limited = RateLimited(_LOG, 5.0)
        self._junk_count = 0
        self._full = 0  # batches in a row that did not empty the socket
        self._events: list[Event] = []
        self._timer: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[int] | None = None

    def _announce(self, port_file: Path | None) -> None:
        """Say that the port is open: one line on stdout, and the port file."""
        if port_file is not None:
            new = port_file.with_name(f"{port_file.name}.{os.getpid()}")
            new.write_text(f"{self._address}\n", encoding="utf-8")
            new.replace(port_file)
        expected = f"{self._config.workers} workers, {self._config.servers} servers expected"
        sys.stdout.write(f"coordinator ready on {self._address} ({expected})\n")
        sys.stdout.flush()

    async def serve(self, port_file: Path | None) -> int:
        """Until a signal, or the end of the job with ``once``."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        self._announce(port_file)
        watched = (int(self._router.getsockopt(zmq.FD)), self._closings.descriptor)
        for descriptor in watched:
            loop.add_reader(descriptor, self._wake)
        self._wake()
        try:
            return await self._over
        finally:
            for descriptor in watched:
                loop.remove_reader(descriptor)
            if self._timer is not None:
                self._timer.cancel()

    def close(self) -> None:
        """Let the last messages go out, then close."""
        self._closings.close()
        self._router.close(LINGER_MS)

    def _wake(self) -> None:
        """Handle a batch of messages, what closed before they came, and a deadline that passed."""
        emptied = not all(self._receive() for _ in range(BATCH))
        self._full = 0 if emptied else self._full + 1
        self._events += [Disconnected(peer) for peer in self._closings.take()]
        self._handle()
        deadline = self._core.next_deadline()
        due = deadline is not None and time.monotonic() >= deadline
        if due and (emptied or self._full >= PATIENCE):
            self._events.append(Tick())
            self._handle()
        self._set_timer()

    def _set_timer(self) -> None:
        """Come back at once while messages wait, else at the deadline."""
        if self._over is None or self._over.done():
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            loop.call_soon(self._wake)
            return
        deadline = self._core.next_deadline()
        if deadline is not None:
            self._timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._wake)

    def _receive(self) -> bool:
        """Turn one message into an event; False if none waits."""
        try:
            frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        peer = frames[0].bytes
        try:
            self._closings.note(frames[-1], peer)
            if len(frames) != 2:
                raise ProtocolError(f"{len(frames) - 1} frames, expected 1")
            self._events.append(Received(peer, decode(frames[1].buffer)))
        except ProtocolError as error:
            self._log_junk(peer, error.message)
        self._handle()
        return True

    def _handle(self) -> None:
        """Step through all events, those that sending brings up included."""
        while self._events:
            actions = self._core.step(self._events.pop(0), time.monotonic())
            encoded: dict[int, bytes] = {}
            for action in actions:
                match action:
                    case Send(peer, message):
                        data = encoded.get(id(message)) or CONTROL.encode(message)
                        encoded[id(message)] = data
                        self._send(peer, data)
                    case Log(level, text, key):
                        self._log(logging.getLevelName(level.upper()), text, key)
                    case Junk(peer, text):
                        self._log_junk(peer, text)
                    case Learnt(record) if self._kept is not None:
                        self._kept.keep(record)
                    case JobOver(failed) if self._once:
                        self._end(int(failed))

    def _send(self, peer: bytes, data: bytes) -> None:
        try:
            self._router.send_multipart((peer, data), zmq.NOBLOCK)
        except zmq.Again:
            self._limited.log(logging.WARNING, "full", "a peer takes nothing; message dropped")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._events.append(Disconnected(peer))

    def _log(self, level: int, text: str, key: str) -> None:
        if key:
            self._limited.log(level, key, "%s", text)
        else:
            _LOG.log(level, "%s", text)

    def _log_junk(self, peer: bytes, text: str) -> None:
        self._junk_count += 1
        self._limited.log(
            logging.WARNING, "junk", "ignored (%d so far), peer %s: %s",
            self._junk_count, peer.hex()[:32], text,
        )  # fmt: skip

    def _stop(self, number: int) -> None:
        idle = self._core.phase is Phase.IDLE
        _LOG.info("stopped by %s", signal.Signals(number).name)
        self._events.append(Stop(signal.Signals(number).name))
        self._handle()
        self._end(130 if number == signal.SIGINT else int(not idle))

    def _end(self, code: int) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(code)
