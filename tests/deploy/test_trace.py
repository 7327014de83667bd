"""``gradsum trace merge``: clocks planted seconds apart, files that are cut off, empty folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradsum import cli
from gradsum.trace import Flow, SliceArgs, Span, Trace, arrow

Event = dict[str, Any]
DELAY = 0.002  # the least delay on any way


class Machine:
    """A process that shows its own time."""

    def __init__(self, folder: Path, role: str, number: int, clock: str, lead: float) -> None:
        self._trace = Trace(folder, role)
        self._trace.number = number
        self._clock = clock
        self._lead = lead

    def span(
        self, kind: str, start: float, end: float, args: SliceArgs, flow: tuple[str, float, str]
        | None = None,
    ) -> None:  # fmt: skip
        """Times are true ones."""
        end_of_arrow = None
        if flow is not None:
            end_, at, direction = flow
            ident = arrow("run", 1, args, args.rank or 0, direction)
            end_of_arrow = Flow(end_, at + self._lead, direction, ident)
        self._trace.add(
            Span(kind, "t", start + self._lead, end + self._lead, args, end_of_arrow)
        )

    def write(self) -> Path:
        """The file, as the machine with this clock would have written it."""
        path = self._trace.write()
        assert path is not None
        whole = json.loads(path.read_text())
        whole["otherData"] |= {"clock": self._clock, "host": self._clock}
        path.write_text(json.dumps(whole))
        return path


def job(folder: Path, leads: tuple[float, float, float]) -> list[Path]:
    """Two workers and a server on three machines; every version takes a second."""
    clocks = ("one", "two", "three")
    machines = [Machine(folder, role, number, clock, lead) for role, number, clock, lead in
                zip(("worker", "worker", "server"), (0, 1, 0), clocks, leads, strict=True)]
    server = machines[2]
    for version in range(1, 6):
        slow = 0.01 * (version != 3)  # the third version travels fastest, both ways
        for rank in (0, 1):
            args = SliceArgs(0, 0, version, rank, 4, 0, 0, 1)
            left = version + 0.1 * rank
            arrived = left + DELAY + slow
            replied = version + 0.5 + 0.05 * rank
            got = replied + DELAY + slow
            machines[rank].span("push", left, left + 0.3, args, ("s", left, "push"))
            server.span("add", arrived, arrived + 0.02, args, ("f", arrived, "push"))
            server.span("reply", replied, replied + 0.001, args, ("s", replied, "sum"))
            machines[rank].span("sum", got - 0.01, got + 0.01, args, ("f", got, "sum"))
    return [machine.write() for machine in machines]


def merged(path: Path) -> list[Event]:
    found: list[Event] = json.loads(path.read_text())["traceEvents"]
    return found


def test_planted_offsets_of_seconds_are_undone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path, (100.0, 93.5, 117.25))
    assert cli.main(["trace", "merge", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["out"] == str(tmp_path / "timeline.json")
    assert [p["name"] for p in said["processes"]] == ["worker 0", "worker 1", "server 0"]
    offsets = [p["offset"] for p in said["processes"]]
    assert offsets == pytest.approx([0.0, -6.5, 17.25], abs=1e-6)
    assert [p["error"] for p in said["processes"]] == pytest.approx([0, 2 * DELAY, DELAY], abs=1e-6)
    assert (said["arrows"], said["ends_without_arrow"], said["skipped"]) == (20, 0, {})
    events = merged(tmp_path / "timeline.json")
    spans = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in spans) == 0
    for event in spans:  # true times, within what is said to be the error
        args, kind = event["args"], event["cat"]
        slow = 0.01 * (args["version"] != 3)
        truth = {
            "push": args["version"] + 0.1 * args["rank"],
            "add": args["version"] + 0.1 * args["rank"] + DELAY + slow,
            "reply": args["version"] + 0.5 + 0.05 * args["rank"],
            "sum": args["version"] + 0.5 + 0.05 * args["rank"] + DELAY + slow - 0.01,
        }[kind]
        assert event["ts"] / 1e6 == pytest.approx(truth - 1.0, abs=2 * DELAY)


def test_arrows_are_numbered_pair_by_pair_and_point_forward(tmp_path: Path) -> None:
    job(tmp_path, (0.0, 40.0, -25.0))
    out = tmp_path / "all.json"
    assert cli.main(["trace", "merge", str(tmp_path), "--out", str(out)]) == 0
    events = merged(out)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    stops = {e["id"]: e for e in events if e["ph"] == "f"}
    assert sorted(starts) == sorted(stops) == list(range(1, 21))
    assert sum(e["ph"] in "sf" for e in events) == 40
    for number, start in starts.items():
        assert start["ts"] < stops[number]["ts"]
        assert start["name"] == stops[number]["name"]
        assert start["pid"] != stops[number]["pid"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "worker 0 on one", 2: "worker 1 on two", 3: "server 0 on three"}
    for end in (*starts.values(), *stops.values()):  # Perfetto ties an end to the span around it
        assert any(
            s["ph"] == "X" and (s["pid"], s["tid"]) == (end["pid"], end["tid"])
            and s["ts"] <= end["ts"] <= s["ts"] + s["dur"] for s in events
        )  # fmt: skip


def test_processes_of_one_boot_have_no_offset_whatever_frames_say(tmp_path: Path) -> None:
    for path in job(tmp_path, (0.0, 0.0, 3.0)):
        whole = json.loads(path.read_text())
        whole["otherData"]["clock"] = "one"
        path.write_text(json.dumps(whole))
    assert cli.main(["trace", "merge", str(tmp_path)]) == 0
    events = merged(tmp_path / "timeline.json")
    adds = [e["ts"] for e in events if e.get("cat") == "add"]
    assert min(adds) == pytest.approx(3e6 + 0.012e6, abs=1)


def test_a_file_that_was_cut_off_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, _ = job(tmp_path, (0.0, 1.0, 2.0))
    second.write_text(second.read_text()[:-40])
    assert cli.main(["trace", "merge", str(tmp_path), "--json"]) == 1
    found = capsys.readouterr()
    assert f"skipped {second}: not JSON, perhaps cut off" in found.err
    said = json.loads(found.out)
    assert list(said["skipped"]) == [str(second)]
    assert [p["name"] for p in said["processes"]] == ["worker 0", "server 0"]
    assert (said["arrows"], said["ends_without_arrow"]) == (10, 10)
    first.unlink()
    (tmp_path / "timeline.json").unlink()
    for path in tmp_path.iterdir():
        path.write_bytes(b"\xff")
    assert cli.main(["trace", "merge", str(tmp_path)]) == 1
    assert not (tmp_path / "timeline.json").exists()


@pytest.mark.parametrize(
    "text",
    ["[]", "3", '{"traceEvents": []}', '{"otherData": {"format": 99}, "traceEvents": []}',
     '{"otherData": {"format": 1}, "traceEvents": []}', ""],
)  # fmt: skip
def test_json_of_somebody_else_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path, (0.0, 1.0, 2.0))
    other = tmp_path / "server-9-9.json"
    other.write_text(text)
    assert cli.main(["trace", "merge", str(tmp_path)]) == 1
    found = capsys.readouterr()
    assert f"skipped {other}" in found.err
    assert "worker 1" in found.out
    assert "arrows   20, 0 ends" in found.out


def test_events_that_are_no_events_are_refused(tmp_path: Path) -> None:
    path = job(tmp_path, (0.0, 1.0, 2.0))[0]
    whole = json.loads(path.read_text())
    for wrong in (3, {"ph": "X", "pid": 1}, {"ph": "s", "pid": 1, "ts": 1.0}, {"ph": "M"}):
        path.write_text(json.dumps(whole | {"traceEvents": [wrong]}))
        assert cli.main(["trace", "merge", str(tmp_path)]) == 1


def test_a_second_merge_does_not_take_the_first_ones_result_for_a_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path, (0.0, 1.0, 2.0))
    for _ in range(2):
        assert cli.main(["trace", "merge", str(tmp_path), "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["processes"]) == 3


def test_an_empty_or_missing_folder_is_a_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert cli.main(["trace", "merge", str(folder)]) == 2
        err = capsys.readouterr().err
        assert str(folder) in err
        assert "GRADSUM_TRACE" in err


def test_a_result_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path, (0.0, 1.0, 2.0))
    out = tmp_path / "missing" / "all.json"
    assert cli.main(["trace", "merge", str(tmp_path), "--out", str(out)]) == 2
    assert str(out) in capsys.readouterr().err
