"""The recorder: bounds, counts, rows without overlap, files that are whole or not there."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.errors import ConfigError
from gradsum.trace import Flow, SliceArgs, Span, Trace, WaitArgs, arrow, clock_name, rows

ARGS = SliceArgs(3, 1, 7, 0, 1024, -2, 5, 1)


def span(start: float, end: float, kind: str = "push", flow: Flow | None = None) -> Span:
    return Span(kind, "opt0/weight", start, end, ARGS, flow)


def written(trace: Trace) -> dict[str, Any]:
    trace.number = 0
    path = trace.write()
    assert path is not None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_a_file_says_who_wrote_it_and_what_was_recorded(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "new" / "folder", "worker")
    trace.add(span(10.0, 10.5, flow=Flow("s", 10.0, "push", "x up")))
    trace.add(span(10.25, 11.0, "sum", Flow("f", 10.75, "sum", "x down")))
    trace.add(Span("wait", 'quote " and é', 9.0, 12.0, WaitArgs(3, 7, 4096, 0)))
    trace.number = 4
    path = trace.write()
    assert path == tmp_path / "new" / "folder" / f"worker-4-{os.getpid()}.json"
    assert os.listdir(path.parent) == [path.name], "nothing else is left"
    whole = json.loads(path.read_text(encoding="utf-8"))
    about = whole["otherData"]
    assert (about["role"], about["number"], about["pid"]) == ("worker", 4, os.getpid())
    assert (about["spans"], about["dropped"], about["clock"]) == (3, 0, clock_name())
    by_kind = {e["cat"]: e for e in whole["traceEvents"] if e["ph"] == "X"}
    assert (by_kind["push"]["ts"], by_kind["push"]["dur"]) == (10e6, 0.5e6)
    assert by_kind["push"]["name"] == "opt0/weight"
    assert by_kind["push"]["args"] == {"key": 3, "slice": 1, "version": 7, "rank": 0,
                                       "bytes": 1024, "priority": -2, "server": 5,
                                       "epoch": 1}  # fmt: skip
    assert by_kind["wait"]["name"] == 'quote " and é'
    assert by_kind["wait"]["args"] == {"key": 3, "version": 7, "bytes": 4096, "priority": 0}
    ends = {e["ph"]: e for e in whole["traceEvents"] if e["ph"] in "sf"}
    assert (ends["s"]["ts"], ends["s"]["id"]) == (10e6, "x up")
    assert (ends["f"]["ts"], ends["f"]["id"], ends["f"]["bp"]) == (10.75e6, "x down", "e")
    assert ends["s"]["tid"] == by_kind["push"]["tid"]
    assert ends["f"]["tid"] == by_kind["sum"]["tid"]
    names = {e["tid"]: e["args"]["name"] for e in whole["traceEvents"] if e["ph"] == "M"}
    assert names == {0: "worker 4", by_kind["wait"]["tid"]: "wait", by_kind["push"]["tid"]: "push",
                     by_kind["sum"]["tid"]: "sum"}  # fmt: skip


def test_the_first_and_the_newest_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "server", first=2, newest=3)
    for second in range(5):
        trace.add(span(second, second + 0.5))
    assert trace.dropped == 0
    for second in range(5, 10):
        trace.add(span(second, second + 0.5))
    assert trace.dropped == 5
    whole = written(trace)
    assert (whole["otherData"]["spans"], whole["otherData"]["dropped"]) == (5, 5)
    starts = [e["ts"] / 1e6 for e in whole["traceEvents"] if e["ph"] == "X"]
    assert starts == [0, 1, 7, 8, 9]


def test_two_threads_lose_nothing(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "worker", first=100, newest=100)

    def record() -> None:
        for second in range(2000):
            trace.add(span(second, second + 1))

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert trace.dropped == 4000 - 200


def test_a_file_is_written_again_only_when_there_is_more(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "worker")
    assert trace.write() is None, "not a member yet"
    trace.number = 1
    path = trace.write()
    assert path is not None
    assert trace.write() is None
    trace.add(span(1, 2))
    assert trace.write() == path
    assert sum(e["ph"] == "X" for e in json.loads(path.read_text())["traceEvents"]) == 1


def test_what_cannot_be_written_is_logged_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace = Trace(tmp_path, "worker")
    before = written(trace)
    trace.add(span(1, 2))

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert trace.write() is None
    assert "No space left on device" in caplog.text
    (left,) = tmp_path.iterdir()
    assert json.loads(left.read_text()) == before


@pytest.mark.parametrize("inside", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        Trace.of(str(tmp_path / inside), "worker")
    assert str(tmp_path / inside) in caught.value.message
    assert "GRADSUM_TRACE" in (caught.value.hint or "")


def test_without_the_setting_there_is_no_trace() -> None:
    assert Trace.of(None, "worker") is None


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40))
def test_spans_of_a_row_never_overlap_and_rows_are_as_few_as_can_be(
    found: list[tuple[int, int]],
) -> None:
    spans = [span(start, start + length) for start, length in found]
    dealt = list(rows(spans))
    assert sorted(s for _, s in dealt) == sorted(spans)
    last: dict[int, float] = {}
    for row, one in dealt:
        assert last.get(row, -1.0) < one.start
        last[row] = one.end
    most = max((sum(s.start <= at.start <= s.end for s in spans) for at in spans), default=0)
    assert len(last) == most


def test_names_of_frames_differ_in_each_of_their_parts() -> None:
    base = arrow("abcdefghij", 3, ARGS, 0, "push")
    others = [
        arrow("bbcdefghij", 3, ARGS, 0, "push"), arrow("abcdefghij", 4, ARGS, 0, "push"),
        arrow("abcdefghij", 3, ARGS, 1, "push"), arrow("abcdefghij", 3, ARGS, 0, "sum"),
        *(arrow("abcdefghij", 3, ARGS._replace(**{name: 9}), 0, "push")
          for name in ("key", "slice", "version")),
    ]  # fmt: skip
    assert len({base, *others}) == 8
    assert arrow("abcdefghij", 3, ARGS._replace(server=8, bytes=1), 0, "push") == base
