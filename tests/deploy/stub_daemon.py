"""A coordinator or server that speaks to nobody: what the launcher sees of a daemon, and no more.

STUB_<ROLE> says how it behaves: "stay" (default) waits for SIGTERM, "deaf" ignores it, "fail" ends
with 1 when the folder STUB_FOLDER holds a file "end", "busy" ends with 2 at once, "mute" never gets
ready, "crash" kills itself when there is a file "crash".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main(role: str, arguments: list[str]) -> int:
    how = os.environ.get(f"STUB_{role.upper()}", "stay")
    folder = Path(os.environ["STUB_FOLDER"])
    assert "--once" not in arguments, "a script may call init again after shutdown"
    if how == "busy":
        print("gradsum: cannot listen on 127.0.0.1:7: in use", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "deaf" else lambda *_: sys.exit(0))
    if role == "coordinator" and how != "mute":
        file = Path(arguments[arguments.index("--port-file") + 1])
        file.with_suffix(".new").write_text("127.0.0.1:1234\n")
        file.with_suffix(".new").rename(file)
    print(f"{role} ready")
    if "--log-level" not in arguments:
        print(f"[{role}] log line", file=sys.stderr)
    while True:
        if how == "fail" and (folder / "end").exists():
            return 1
        if how == "crash" and (folder / "crash").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
