"""``gradsum plan``: the table, its knee, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gradsum import cli
from gradsum.deploy.plan import GOODPUT, answer, spread
from gradsum.scheduler.fluid import all_reduce, optimum
from gradsum.scheduler.profiles import profile
from gradsum.scheduler.simulator.cluster import Cluster
from gradsum.scheduler.simulator.run import simulate

WORDS = ["plan", "--model", "vgg16", "--workers", "4", "--gbps", "10"]


def plan(capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    assert cli.main([*WORDS, "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_rows_are_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--step-ms", "500", "--servers", "0,2..4")
    assert [row["servers"] for row in found["rows"]] == [0, 2, 3, 4]
    rate = 10e9 / 8 * GOODPUT
    shape = profile("vgg16").paced(0.5)
    assert found["all_reduce"] == pytest.approx(all_reduce(shape, 4, 0, rate))
    for row in found["rows"]:
        cluster = Cluster.equal(4, row["servers"], rate, latency=100e-6, frame=150e-6)
        assert row["seconds"] == pytest.approx(simulate(shape, cluster).seconds)
        assert row["best_seconds"] == pytest.approx(optimum(shape, 4, row["servers"], rate))
        assert row["best_seconds"] <= row["seconds"]
        assert row["gain"] == pytest.approx(found["all_reduce"] / row["seconds"])
        assert 0 < row["link"] <= 1 + 1e-9
    assert (found["assumed"], found["compute"]) == (False, 0.5)


def test_without_a_step_time_computation_is_as_long_as_communication() -> None:
    found = answer(profile("vgg16"), 4, 10, tuple(range(5)), None)
    assert found.assumed
    assert found.compute == pytest.approx(4 * 138_357_544 / (10e9 / 8 * GOODPUT))
    assert found.knee == 4


def test_the_knee_is_where_more_gains_nothing() -> None:
    slow = answer(profile("resnet50"), 64, 25, (0, 16, 32, 48, 64), 10.0)  # computes for ever
    assert slow.knee == 0
    fast = answer(profile("resnet50"), 64, 25, (0, 16, 32, 48, 64), 1e-6)
    assert fast.knee > 40


def test_the_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(WORDS) == 0
    out = capsys.readouterr().out
    assert "assumed" in out and out.count("<- enough") == 1
    assert len([line for line in out.splitlines() if "x  " in line]) == 5


def test_a_large_job_is_planned_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(profile("gpt2"), 10_000, 100, (0, 5_000, 10_000), None)
    assert found.rows[0].seconds > found.rows[-1].seconds


def test_without_servers_there_are_never_too_many_rows() -> None:
    assert spread(3) == (0, 1, 2, 3)
    assert spread(64) == tuple(range(65))
    many = spread(10_000)
    assert len(many) == 65 and (many[0], many[1], many[-1]) == (0, 156, 10_000)


def test_a_profile_of_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    rows = [{"name": "a", "tensors": [25_000_000], "forward": 0.1, "backward": 0.2}]
    file.write_text(json.dumps(rows))
    words = ["plan", "--profile", str(file), "--workers", "2", "--gbps", "1", "--json"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["nbytes"]) == ("mine.json", 100_000_000)
    file.write_text("no JSON")
    assert cli.main(words) == 2
    assert "mine.json is not JSON" in capsys.readouterr().err
    assert cli.main([*words[:2], str(tmp_path / "none"), *words[3:]]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--gbps", "0"], "above 0"), (["--workers", "0"], "from 1"), (["--servers", "8..4"], "holds"),
     (["--servers", "a"], "such as"), (["--step-ms", "nan"], "above 0"),
     (["--model", "x"], "vgg16")],
)  # fmt: skip
def test_what_is_refused(
    more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*WORDS, *more])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_picture_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main([*WORDS, "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install 'gradsum[plot]'" in capsys.readouterr().err
