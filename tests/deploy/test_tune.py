"""``gradsum tune``: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradsum import cli
from gradsum.deploy import tune
from gradsum.proto.transport.ports import free_port
from gradsum.scheduler.record import Record, dump
from gradsum.scheduler.tuner import Setting

SLOW = {"slice_bytes": 1 << 20, "window": 8, "pack_bytes": 1 << 20}
FAST = {"slice_bytes": 1 << 17, "window": 4, "pack_bytes": 1 << 19}
FIGURES = {"steps": 6, "predicted": 0.21, "deviation": 0.0123}
PICTURE: dict[str, Any] = {
    "state": "searching", "current": SLOW, "best": FAST,
    "points": [{**SLOW, **FIGURES, "seconds": 0.5}, {**FAST, **FIGURES, "seconds": 0.2}],
}  # fmt: skip
RECORDS = {"ab-2w-1s": Record("ab-2w-1s", Setting(*FAST.values()), 0.2, "settled", 15)}


def answer(monkeypatch: pytest.MonkeyPatch, status: dict[str, Any]) -> None:
    monkeypatch.setattr(tune, "ask", lambda coordinator, timeout: status)


def test_the_surface_is_shown_with_the_fastest_first() -> None:
    lines = list(tune.describe(PICTURE))
    assert lines[0] == "state    searching"
    assert lines[2] == "best     slices of 128 KiB, 4 under way, 512 KiB packed"
    assert lines[5].split() == ["128", "KiB", "4", "512", "KiB", "200.00", "6", "210.00", "12.30"]
    assert lines[6].split()[:6] == ["1", "MiB", "8", "1", "MiB", "500.00"]


def test_json_is_the_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, {"tunes": True, "tune": PICTURE})
    assert cli.main(["tune", "--coordinator", "127.0.0.1:1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == PICTURE


def test_a_coordinator_without_a_job_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, {"tunes": True})
    assert cli.main(["tune", "--coordinator", "127.0.0.1:1"]) == 0
    assert capsys.readouterr().out == "state    no job\n"


def test_tuning_that_is_off_is_2_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, {"tunes": False})
    assert cli.main(["tune", "--coordinator", "127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert "tuning is off" in error
    assert "--tune" in error


def test_nobody_there_is_3(capsys: pytest.CaptureFixture[str]) -> None:
    where = f"127.0.0.1:{free_port('127.0.0.1')}"
    assert cli.main(["tune", "--coordinator", where, "--timeout", "0.2"]) == 3
    assert where in capsys.readouterr().err


def test_a_kept_file_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tune.json"
    path.write_text(dump(RECORDS))
    assert cli.main(["tune", "--file", str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["ab-2w-1s", "128", "KiB", "4", "512", "KiB", "200.00", "settled", "15"]
    assert cli.main(["tune", "--file", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"]["ab-2w-1s"]["window"] == 4


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_file_that_cannot_be_used_is_2(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tune.json"
    if text is not None:
        path.write_text(text)
    assert cli.main(["tune", "--file", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
