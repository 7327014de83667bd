"""Processes that a launcher starts, and the certainty that they end.

Rules: the launcher is the reaper of all its descendants, so none escapes by losing its parent; a
direct child dies with the launcher whatever kills that (PR_SET_PDEATHSIG belongs to the thread that
forks: the main thread, and there is no other). Signals go to whole trees, found anew each time.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from gradsum.deploy.output import Lines

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TAIL = 50
_ERROR = re.compile(r"((?!DEBUG|INFO|WARNING)[A-Za-z_][\w.]*: .*)|\[\w+\] \S+ ERROR \S+: (.*)")


@dataclass(slots=True)
class Child:
    """A started process. ``label`` prefixes its output, ``name`` speaks of it in sentences."""

    label: str
    name: str
    daemon: bool
    process: subprocess.Popen[bytes]
    lines: dict[int, Lines] = field(default_factory=lambda: {1: Lines(), 2: Lines()})
    tail: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=_TAIL))
    """The last lines of its stderr."""

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    @property
    def code(self) -> int:
        """Exit code as a shell gives it: 128 + n for signal n."""
        code = self.process.returncode or 0
        return 128 - code if code < 0 else code

    @property
    def cause(self) -> str:
        """The last line on stderr that looks like an error; "" if none does.

        Python prints the text of ``sys.exit("text")`` alone, with exit code 1.
        """
        said = [line for line in self.tail if line.strip() and not line[0].isspace()]
        errors = [match[1] or match[2] for line in said if (match := _ERROR.match(line))]
        alone = said if self.code == 1 and not self.daemon else []
        return (errors or alone or [""])[-1]

    @property
    def victim(self) -> bool:
        """Whether it ended because another one did: somebody else is to blame."""
        if self.daemon:
            return self.code in (1, 4)  # the job failed, a peer was lost
        return self.code == 4 or any("gradsum.errors.PeerLost" in line for line in self.tail)

    def story(self) -> str:
        """How it failed, in one sentence."""
        code = self.process.returncode or 0
        if code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            how = f"was killed by {signal.Signals(-code).name}{hint}, exit code {self.code}"
        else:
            how = f"failed with exit code {self.code}"
        who = f"{self.name} (pid {self.process.pid})" if self.daemon else self.name
        return f"{who} {how}" + (f": {self.cause}" if self.cause else "")


def become_reaper() -> None:
    """From now on, orphans among the descendants of this process become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spawn(
    command: Sequence[str], env: Mapping[str, str], *, label: str, name: str, daemon: bool
) -> Child:
    """Start a process in a session of its own, its output in pipes. OSError if that fails."""
    process = subprocess.Popen(
        list(command),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_leash(),
    )
    return Child(label, name, daemon, process)


def _leash() -> Callable[[], None]:
    """Runs in the child between fork and exec: die when the parent dies, even if it has already."""
    prctl, parent, kill = ctypes.CDLL(None).prctl, os.getpid(), int(signal.SIGKILL)

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return bind


def reap(children: Iterable[Child]) -> list[Child]:
    """Collect every process that has ended; returns those of ``children`` among them."""
    known = {child.process.pid: child for child in children if child.running}
    ended = []
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            child = known.get(found.si_pid)
            if child is None:
                os.waitpid(found.si_pid, os.WNOHANG)  # an orphan that came to us
            else:
                child.process.wait()
                ended.append(child)
    return ended


def descendants(spared: Iterable[Child] = ()) -> list[psutil.Process]:
    """Every live descendant of this process, without the trees of the ``spared`` children."""
    safe = set()
    for child in spared:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(child.process.pid)
            safe |= {root, *root.children(recursive=True)}
    own = psutil.Process().children(recursive=True)
    return [process for process in own if process not in safe and _lives(process)]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Signal those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)
