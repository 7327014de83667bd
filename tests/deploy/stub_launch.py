"""Runs the launcher with stub daemons. Arguments: workers, servers, grace, then the command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gradsum.deploy.launch import Launch, run
from gradsum.deploy.ranks import Layout

STUB = Path(__file__).with_name("stub_daemon.py")

if __name__ == "__main__":
    workers, servers, grace, *command = sys.argv[1:]
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
