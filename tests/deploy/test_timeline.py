"""Timelines of real processes: every slice is seen on both sides, in the order it must have."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.processes import Processes

pytestmark = pytest.mark.slow

Event = dict[str, Any]
Eventually = Callable[..., None]
MEMBER = str(Path(__file__).with_name("member.py"))
STEPS = 4

TRAINING = f"""
import torch
import gradsum
gradsum.init()
torch.manual_seed(gradsum.rank())
model = torch.nn.Sequential(torch.nn.Linear(64, 40), torch.nn.Linear(40, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gradsum.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = gradsum.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range({STEPS}):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
total = gradsum.push_pull(torch.full((700,), gradsum.rank() + 1.0), average=False, name="extra")
assert total.tolist() == [3.0] * 700
"""
PARAMETERS = {"opt0/0.weight": 64 * 40, "opt0/0.bias": 40, "opt0/1.weight": 40, "opt0/1.bias": 1}


def launched(processes: Processes, *words: str, **env: str) -> tuple[int, str, str]:
    options = ("--standalone", "--nproc-per-node", "2", "--servers", "1")
    return processes.end(processes.gradsum("launch", *options, "--", "python", *words, **env))


def merged(processes: Processes, folder: str) -> tuple[dict[str, Any], list[Event]]:
    """What the command says, and the events of its file."""
    code, out, err = processes.end(processes.gradsum("trace", "merge", folder, "--json"))
    assert code == 0, err
    said = json.loads(out)
    events = json.loads((processes.folder / said["out"]).read_text())["traceEvents"]
    return said, events


def by_slice(events: list[Event]) -> dict[tuple[int, int, int], dict[str, list[Event]]]:
    """(key, slice, version) -> kind of span -> spans; queues of servers apart."""
    servers = {e["pid"] for e in events if e["name"] == "process_name"
               and e["args"]["name"].startswith("server")}  # fmt: skip
    found: dict[tuple[int, int, int], dict[str, list[Event]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for event in events:
        if event["ph"] == "X" and "slice" in event["args"]:
            args, kind = event["args"], event["cat"]
            kind = "outgoing" if kind == "queue" and event["pid"] in servers else kind
            found[args["key"], args["slice"], args["version"]][kind].append(event)
    return found


def end(event: Event) -> float:
    total: float = event["ts"] + event["dur"]
    return total


@pytest.mark.timeout(120)
def test_every_slice_is_seen_on_both_sides_in_causal_order(processes: Processes) -> None:
    (processes.folder / "train.py").write_text(TRAINING)
    code, _, err = launched(
        processes, "train.py", GRADSUM_TRACE="traces", GRADSUM_SLICE_BYTES="2K",
        GRADSUM_PACK_BYTES="0", GRADSUM_LOG_LEVEL="WARNING",
    )  # fmt: skip
    assert code == 0, err
    files = sorted(path.name.rsplit("-", 1)[0] for path in (processes.folder / "traces").iterdir())
    assert files == ["server-0", "worker-0", "worker-1"]
    said, events = merged(processes, "traces")
    assert [p["dropped"] for p in said["processes"]] == [0, 0, 0]
    assert [p["offset_by"] for p in said["processes"]] == ["same clock"] * 3
    slices = by_slice(events)
    summed = [kinds for kinds in slices.values() if len(kinds["push"]) == 2]
    for kinds in summed:
        in_order(kinds)
    expected: dict[str, int] = {name: STEPS * -(-n * 4 // 2048) for name, n in PARAMETERS.items()}
    expected["extra"] = 2
    counted: dict[str, int] = defaultdict(int)
    for kinds in summed:
        counted[kinds["push"][0]["name"]] += 1
    assert counted == expected
    paired(events, said, pushes=sum(len(k["push"]) for k in slices.values()),
           sums=sum(len(k["sum"]) for k in slices.values()))  # fmt: skip
    broadcasts = [k for k in slices.values() if len(k["push"]) == 1]
    assert {k["push"][0]["name"].split("/")[0] for k in broadcasts} == {"broadcast"}
    assert {len(k["sum"]) for k in broadcasts} == {1}
    waits = {e["name"] for e in events if e.get("cat") == "wait"}
    assert waits
    assert waits <= {e["name"] for e in events if e["ph"] == "X" and e["cat"] == "push"}


def in_order(kinds: dict[str, list[Event]]) -> None:
    """Submitted, pushed, added, gathered, queued again, replied and summed, one after another."""
    names = {event["name"] for spans in kinds.values() for event in spans}
    assert len(names) == 1
    assert {kind: len(spans) for kind, spans in kinds.items()} == {
        "queue": 2, "push": 2, "add": 2, "gather": 1, "outgoing": 2, "reply": 2, "sum": 2
    }  # fmt: skip
    (gather,) = kinds["gather"]
    assert gather["ts"] == min(add["ts"] for add in kinds["add"])
    assert end(gather) == pytest.approx(max(end(add) for add in kinds["add"]), abs=0.002)
    of_rank = {
        kind: {event["args"]["rank"]: event for event in spans}
        for kind, spans in kinds.items() if kind != "gather"
    }  # fmt: skip
    for rank in (0, 1):
        queue, push, add, outgoing, reply, total = (
            of_rank[kind][rank] for kind in ("queue", "push", "add", "outgoing", "reply", "sum")
        )
        assert end(queue) == pytest.approx(push["ts"], abs=0.002)
        assert push["ts"] <= add["ts"] <= end(add) <= end(gather) + 0.002
        assert end(gather) == pytest.approx(outgoing["ts"], abs=0.002)
        assert end(outgoing) == pytest.approx(reply["ts"], abs=0.002)
        assert reply["ts"] <= end(total)
        assert end(push) == pytest.approx(total["ts"], abs=0.002)
        assert push["args"]["bytes"] == add["args"]["bytes"] == total["args"]["bytes"] > 0


def paired(events: list[Event], said: dict[str, Any], *, pushes: int, sums: int) -> None:
    """Each push and each sum has one arrow, from the one process to the other."""
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    stops = {e["id"]: e for e in events if e["ph"] == "f"}
    assert sum(e["ph"] in "sf" for e in events) == 2 * len(starts)
    assert starts.keys() == stops.keys()
    assert all(starts[n]["ts"] <= stops[n]["ts"] for n in starts)
    directions = [e["name"] for e in starts.values()]
    assert (directions.count("push"), directions.count("sum")) == (pushes, sums)
    assert (said["arrows"], said["ends_without_arrow"]) == (pushes + sums, 0)


@pytest.mark.timeout(120)
def test_a_script_that_is_ended_by_sigterm_leaves_its_file(
    processes: Processes, eventually: Eventually
) -> None:
    (processes.folder / "train.py").write_text(
        "import os, pathlib, time\nimport gradsum\ngradsum.init()\n"
        "import torch\ngradsum.push_pull(torch.ones(4), name='t')\n"
        "new = pathlib.Path(f'{gradsum.rank()}.new')\nnew.write_text(str(os.getpid()))\n"
        "new.rename(f'{gradsum.rank()}.pid')\ntime.sleep(100)\n"
    )
    options = ("--standalone", "--nproc-per-node", "2", "--trace", "traces")
    job = processes.gradsum("launch", *options, "--", "python", "train.py")
    files = [processes.folder / f"{rank}.pid" for rank in (0, 1)]
    eventually(lambda: all(file.exists() for file in files), limit=40.0, what="both workers")
    job.send_signal(signal.SIGTERM)
    code, _, _ = processes.end(job)
    assert code == 128 + signal.SIGTERM
    names = {path.name for path in (processes.folder / "traces").iterdir()}
    assert names > {f"worker-{rank}-{files[rank].read_text()}.json" for rank in (0, 1)}
    assert len(names) == 3
    said, _ = merged(processes, "traces")
    assert (said["arrows"], said["ends_without_arrow"]) == (4, 0)


def test_a_job_whose_rank_fails_leaves_the_files_of_all(processes: Processes) -> None:
    (processes.folder / "train.py").write_text(
        "import gradsum\ngradsum.init()\nimport torch\n"
        "gradsum.push_pull(torch.ones(4), name='a')\n"
        "if gradsum.rank() == 1:\n    raise ValueError('planted')\n"
        "gradsum.push_pull(torch.ones(4), name='b')\n"
    )
    code, _, err = launched(processes, "train.py", GRADSUM_TRACE="t")
    assert code == 1
    assert "planted" in err
    files = sorted(path.name.rsplit("-", 1)[0] for path in (processes.folder / "t").iterdir())
    assert files == ["server-0", "worker-0", "worker-1"]
    said, events = merged(processes, "t")
    assert {e["name"] for e in events if e.get("cat") == "add"} >= {"a"}
    assert said["skipped"] == {}


def test_a_folder_that_cannot_be_written_ends_the_job_with_its_name(processes: Processes) -> None:
    (processes.folder / "file").write_text("")
    code, out, err = launched(processes, MEMBER, "sum:a:3", GRADSUM_TRACE="file/below")
    assert (code, out) == (2, "")
    assert err.count("cannot write to the folder file/below") == 1
    assert "Traceback" not in err
    server = processes.gradsum("server", "--coordinator", "127.0.0.1:9", "--trace", "file/below")
    code, _, err = processes.end(server)
    assert code == 2
    assert "cannot write to the folder file/below" in err


def test_without_the_setting_nothing_is_written(processes: Processes) -> None:
    code, _, err = launched(processes, MEMBER, "sum:a:3")
    assert code == 0, err
    assert list(processes.folder.iterdir()) == []
