"""``gradsum launch``: a job's workers on this host, and with --standalone its daemons beside them.

Rules: one thread, one loop; it waits for output, for ends of children and for signals, never for
one child alone. The first child that fails ends all others and gives its exit code; a child that
failed only because another one did is not blamed if the other one shows up within moments. Workers
are ended before daemons, so that nobody complains about a daemon that we ended ourselves. After
``grace`` seconds everything that still lives is killed; nothing is left behind.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from gradsum.deploy import ranks
from gradsum.deploy.children import Child, become_reaper, descendants, reap, send, spawn
from gradsum.deploy.output import Console
from gradsum.errors import ConfigError
from gradsum.proto.transport.ports import free_port

DAEMON = (sys.executable, "-P", "-m", "gradsum")  # -P: the user's folder must not shadow modules
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SETTLE = 3.0  # seconds in which the culprit may show up after its victims
LAST_LIMIT = 5.0  # seconds to wait for killed processes
TICK = 0.2


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of the launcher."""

    command: tuple[str, ...]  # complete, see command.resolve
    layout: ranks.Layout
    env: Mapping[str, str]  # what the children inherit, settings of the command line included
    servers: int = 0  # > 0: standalone, with this many servers and a coordinator
    coordinator: str | None = None  # HOST:PORT of a running one
    job: str = "default"
    master_addr: str | None = None
    master_port: int | None = None
    grace: float = 10.0
    start_timeout: float = 30.0
    unknown: tuple[str, ...] = ()  # misspelt variables: said once, so the daemons need not
    verbose: bool = False  # daemons at INFO, with what they print
    daemon: tuple[str, ...] = DAEMON


def run(launch: Launch) -> int:
    """Run the job to its end; the exit code is that of the child to blame, or 128 + signal."""
    if not launch.servers and not launch.coordinator and launch.layout.world > 1:
        raise ConfigError(
            f"{launch.layout.world} workers need a coordinator",
            hint="--standalone starts one here, --coordinator HOST:PORT joins a running one",
        )
    become_reaper()
    console = Console(sys.stdout.buffer, sys.stderr.buffer)
    with tempfile.TemporaryDirectory(prefix="gradsum-launch-") as folder:
        return _Job(launch, console, Path(folder)).run()


class _Job:
    def __init__(self, launch: Launch, console: Console, folder: Path) -> None:
        self._launch = launch
        self._console = console
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._failed: list[Child] = []  # in the order in which they were seen to fail
        self._signals: list[int] = []
        self._answered = 0  # signals that the note has spoken of: any further one kills
        self._ending = False

    def run(self) -> int:
        with self._signals_seen():
            try:
                if self._start():
                    self._wait(lambda: not self._running(daemons=False))
                code = self._blame()
            finally:
                self._end()
        return code

    # start

    def _start(self) -> bool:
        """Start everything; False when something failed or a signal came meanwhile."""
        address = self._launch.coordinator
        if self._launch.servers:
            address = self._start_daemons()
            if address is None:
                return False
        base = ranks.clean(self._launch.env) | self._common(address)
        for local in range(self._launch.layout.workers):
            rank = self._launch.layout.rank(local)
            env = base | ranks.worker_variables(self._launch.layout, local)
            self._spawn(self._launch.command, env, f"w{rank}", f"rank {rank}", daemon=False)
        return True

    def _common(self, address: str | None) -> dict[str, str]:
        """What all workers get beside what they inherit."""
        launch, port = self._launch, self._launch.master_port
        if port is None and launch.layout.launchers == 1:
            port = free_port()
        common = ranks.master_address(launch.layout, launch.env, launch.master_addr, port)
        common["GRADSUM_JOB"] = launch.job
        if address:
            common["GRADSUM_COORDINATOR"] = address
        if launch.layout.workers > 1 and "OMP_NUM_THREADS" not in launch.env:
            common["OMP_NUM_THREADS"] = "1"  # as torchrun: all cores for each would be too many
        return common

    def _start_daemons(self) -> str | None:
        """Coordinator, then servers; the coordinator's address once it is bound."""
        launch, file = self._launch, self._folder / "coordinator"
        env = ranks.clean(launch.env) | {"GRADSUM_JOB": launch.job}
        env = {name: value for name, value in env.items() if name not in launch.unknown}
        sizes = ("--workers", str(launch.layout.world), "--servers", str(launch.servers))
        where = ("--bind", "127.0.0.1:0", "--port-file", str(file))
        command = (*launch.daemon, "coordinator", *where, *sizes, *self._daemon_flags())
        self._spawn(command, env, "coordinator", "the coordinator", daemon=True)
        if not self._wait(file.exists, launch.start_timeout):
            if not self._failed and not self._signals:
                self._console.note(f"the coordinator is not ready after {launch.start_timeout:g} s")
                self._failed.append(self._children[0])
            return None
        address = file.read_text().strip()
        for index in range(launch.servers):
            command = (*launch.daemon, "server", "--coordinator", address, "--shards", "1")
            command += self._daemon_flags()
            self._spawn(command, env, f"s{index}", f"server {index}", daemon=True)
        return address

    def _daemon_flags(self) -> tuple[str, ...]:
        """Daemons are quiet unless somebody wants to hear them."""
        heard = self._launch.verbose or "GRADSUM_LOG_LEVEL" in self._launch.env
        return () if heard else ("--log-level", "WARNING")

    def _spawn(
        self, command: tuple[str, ...], env: Mapping[str, str], label: str, name: str, daemon: bool
    ) -> None:
        try:
            child = spawn(command, env, label=label, name=name, daemon=daemon)
        except OSError as error:
            raise ConfigError(
                f"cannot start {command[0]}: {error.strerror}", hint="is it an executable file?"
            ) from None
        self._children.append(child)
        for number, pipe in ((1, child.process.stdout), (2, child.process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, (child, number, pipe))

    # the loop

    def _running(self, *, daemons: bool) -> list[Child]:
        return [child for child in self._children if child.running and child.daemon is daemons]

    def _wait(self, condition: Callable[[], object], limit: float = float("inf")) -> bool:
        """True once the condition holds; False when a child failed, a signal came or time is up."""
        deadline = time.monotonic() + limit
        while not (self._failed or self._signals):
            if condition():
                return True
            if time.monotonic() >= deadline:
                return False
            self._tick()
        return False

    def _tick(self, limit: float = TICK) -> None:
        """Handle what happened, waiting for something to happen for ``limit`` seconds at most."""
        for key, _ in self._selector.select(limit):
            if key.data is None:
                with suppress(BlockingIOError):
                    os.read(key.fd, 4096)
            else:
                self._read(*key.data)
        for child in reap(self._children):
            self._read_rest(child)
            if child.code:
                self._failed.append(child)

    def _read(self, child: Child, number: int, pipe: IO[bytes]) -> bool:
        """Pass on what a pipe holds; False at its end or when it is empty."""
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        lines = child.lines[number]
        for line in lines.feed(data) if data else lines.close():
            self._show(child, number, line)
        if child.label == "w0":
            self._console.bar(number, child.label, lines.bar)
        if not data:
            self._selector.unregister(pipe)
            pipe.close()
        return bool(data)

    def _read_rest(self, child: Child) -> None:
        """What an ended child has written; a grandchild may still hold the pipes open."""
        for key in list(self._selector.get_map().values()):
            if key.data and key.data[0] is child:
                while self._read(*key.data):
                    pass

    def _show(self, child: Child, number: int, line: bytes) -> None:
        if number == 2:
            child.tail.append(line.decode(errors="replace"))
        if not child.daemon:
            self._console.line(number, child.label, line)
        elif self._launch.verbose or (number == 2 and not self._ending):
            self._console.line(2, child.label, line)  # ended by us, a daemon says nothing new

    # the end

    def _blame(self) -> int:
        """The exit code of a failed or interrupted job after saying why, 0 for none."""
        deadline = time.monotonic() + SETTLE
        while (
            not self._signals
            and self._failed
            and all(child.victim for child in self._failed)
            and any(child.running for child in self._children)
            and time.monotonic() < deadline
        ):
            self._tick()
        if self._signals:
            name = signal.Signals(self._signals[0]).name
            self._answered = len(self._signals)  # before the note, so that none is lost behind it
            self._console.note(f"{name}: ending the job (once more kills it)")
            return 128 + self._signals[0]
        if not self._failed:
            return 0
        guilty = min(self._failed, key=lambda child: (child.victim, child.label != "coordinator"))
        self._console.note(guilty.story())
        return guilty.code or 1

    def _end(self) -> None:
        """End every process that is left, workers first; returns when none is."""
        start = time.monotonic()
        self._ending = True
        told: set[psutil.Process] = set()
        while (left := descendants()) or any(child.running for child in self._children):
            late = time.monotonic() - start - self._launch.grace
            if late > LAST_LIMIT:
                pids = ", ".join(str(process.pid) for process in left)
                self._console.note(f"could not end these processes: {pids}")
                break
            if late > 0 or len(self._signals) > self._answered:
                send(left, signal.SIGKILL)
            else:
                turn = descendants(spared=self._running(daemons=True)) or left
                send(set(turn) - told, signal.SIGTERM)
                told |= set(turn)
            self._tick(0.05)
        for child in self._children:
            self._read_rest(child)
        self._selector.close()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    @contextmanager
    def _signals_seen(self) -> Iterator[None]:
        """Signals wake the loop and are noted; the former handlers come back at the end."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        self._selector.register(reader, selectors.EVENT_READ, None)
        former_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        heard = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]  # nohup
        former = {number: signal.signal(number, self._note_signal) for number in heard}
        former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former_fd)
            os.close(reader)
            os.close(writer)
