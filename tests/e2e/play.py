"""One worker process of a crew: plays the scenarios that its task file names, one after the other.

Each is a job of its own on a service that stands, or all share the one job of a launcher. A
scenario that fails ends its job by an error, so the other ranks fail at once; one that hangs ends
this process after its limit. One line of JSON per scenario goes to the rank's result file.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import gradsum
from gradsum.deploy.status import ask
from gradsum.worker.default import default
from tests.e2e.scenarios import collect
from tests.e2e.stage import Meeting, Place, Scenario, Stage

GRACE = 15.0  # seconds beyond a scenario's limit, in which gradsum's own deadlines pass


def play(what: Scenario, rank: int, place: Place, meeting: Meeting) -> dict[str, Any]:
    """Run one scenario; what came of it."""
    stage = Stage(what, rank, place, meeting, 0)
    record: dict[str, Any] = {"name": what.name, "ok": True, "value": None, "error": ""}
    start = time.monotonic()
    faulthandler.dump_traceback_later(what.limit + GRACE, exit=True)
    try:
        stage.enter()
        record["value"] = what.act(stage)
    except Exception:
        record |= {"ok": False, "error": traceback.format_exc()}
        if default.client is not None:
            default.client.session.abort("the scenario failed")
    finally:
        if not place.joined or not record["ok"]:
            gradsum.shutdown()
        faulthandler.cancel_dump_traceback_later()
    record["seconds"] = round(time.monotonic() - start, 3)
    return record


def here() -> Place:
    """Join the job of the environment, for all scenarios."""
    gradsum.init()
    coordinator = os.environ["GRADSUM_COORDINATOR"]
    servers = ask(coordinator, 5.0)["servers"]
    return Place(coordinator, tuple(server["pid"] for server in servers), {}, joined=True)


def main() -> None:
    """Play what belongs to this rank."""
    task = json.loads(Path(sys.argv[1]).read_text())
    shared = here() if task["shared"] else None
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    folder = Path(task["folder"])
    meeting = Meeting(folder / "meetings", rank)
    known = collect()
    with (folder / f"results.{rank}").open("w") as results:
        for turn, (name, place) in enumerate(task["scenarios"]):
            if rank < known[name].ranks:
                meeting.wait(f"begin {turn}", known[name].ranks, task["limit"])
                record = play(known[name], rank, shared or Place(*place), meeting)
                results.write(json.dumps(record) + "\n")
                results.flush()


if __name__ == "__main__":
    main()
