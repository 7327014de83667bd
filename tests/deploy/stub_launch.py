"""Runs the launcher with stub daemons. Arguments: workers, servers, grace, then the command.

With STUB_AGAIN it is interrupted once more at the moment when it has said that it may be.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from gradsum.deploy.launch import Launch, run
from gradsum.deploy.output import Console
from gradsum.deploy.ranks import Layout

STUB = Path(__file__).with_name("stub_daemon.py")

def interrupt_after_the_note() -> None:
    note = Console.note

    def noted(self: Console, text: str) -> None:
        note(self, text)
        if "once more" in text:
            signal.raise_signal(signal.SIGINT)

    Console.note = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    workers, servers, grace, *command = sys.argv[1:]
    if "STUB_AGAIN" in os.environ:
        interrupt_after_the_note()
    launch = Launch(
        command=tuple(command),
        layout=Layout(int(workers)),
        env=os.environ,
        servers=int(servers),
        coordinator=None if int(servers) else "127.0.0.1:1234",
        grace=float(grace),
        start_timeout=3.0,
        verbose="STUB_VERBOSE" in os.environ,
        daemon=(sys.executable, str(STUB)),
    )
    sys.exit(run(launch))
