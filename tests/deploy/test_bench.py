"""``gradsum bench``: options, exit codes, and processes for real."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradsum.deploy import bench
from gradsum.deploy.bench_probe import Probe
from gradsum.errors import UsageError


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(["push-pull", *words])


@pytest.mark.parametrize(
    "words",
    [
        ["--workers", "0"],
        ["--workers", "251"],
        ["--servers", "-1"],
        ["--mb", "0"],
        ["--mb", "nan"],
        ["--mb", "much"],
        ["--tensors", "1.5"],
        ["--rounds", "0"],
        ["--against", "mpi"],
        ["--form", "lists"],
        ["--wire", "fp8"],
        ["--transport", "ipc"],
    ],
)
def test_bad_arguments_are_refused_with_what_is_allowed(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        arguments(*words)
    assert exit_.value.code == 2
    assert words[0] in capsys.readouterr().err


def stub(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Have ``bench.run`` start a program of one line in the launcher's place."""

    def command(args: argparse.Namespace, total_bytes: int, result: Path) -> list[str]:
        return [sys.executable, "-c", program, str(result)]

    monkeypatch.setattr(bench, "command", command)
    monkeypatch.setattr(bench, "probe", lambda: Probe(2.0, 8.0, 6.0))


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_command_carries_every_choice() -> None:
    plain = bench.command(arguments(), 4000, Path("r"))
    assert option(plain, "--form") == "tensors" and option(plain, "--wire") == "fp32"
    assert option(plain, "--rounds") == "23" and option(plain, "--warmup") == "3"
    assert not {"--gloo", "--ddp"} & set(plain)
    chosen = arguments("--form", "gradients", "--wire", "bf16", "--against", "both")
    words = bench.command(chosen, 4000, Path("r"))
    assert option(words, "--form") == "gradients" and option(words, "--wire") == "bf16"
    assert {"--gloo", "--ddp"} < set(words)
    only = bench.command(arguments("--against", "ddp"), 4000, Path("r"))
    assert "--ddp" in only and "--gloo" not in only


def test_the_transport_of_the_flag_reaches_all_processes_else_the_environment_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(monkeypatch, "import os, sys; sys.exit('saw ' + os.environ['GRADSUM_TRANSPORT'])")
    monkeypatch.setenv("GRADSUM_TRANSPORT", "tcp")
    for words, seen in (("--transport", "shm"), "saw shm"), ((), "saw tcp"):
        assert bench.run(arguments(*words)) == 1
        assert seen in capsys.readouterr().err


def test_more_workers_than_a_wire_has_exact_sums_for_are_refused() -> None:
    with pytest.raises(UsageError, match="bf16 can be checked for 10 workers"):
        bench.run(arguments("--workers", "11", "--wire", "bf16"))


WRITE = "import sys, json; json.dump({}, open(sys.argv[1], 'w'))"


def test_a_wrong_element_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("gradsum", "gloo")
    measured: dict[str, Any] = {
        "contenders": {name: {"seconds": [9.0, 2.0], "wrong": n} for n, name in enumerate(names)},
        "links": {"0": "shm"},
        "usage": {
            what: dict.fromkeys(names, [0.5, 0.5])
            for what in ("minor_faults", "cpu_seconds", "idle")
        },
    }
    stub(monkeypatch, WRITE.format(measured))
    assert bench.run(arguments("--rounds", "1", "--warmup", "1", "--mb", "1000", "--json")) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["wrong_elements"] == {"gradsum": 0, "gloo": 1}
    assert report["gradsum"]["goodput_gb_per_second"] == 0.5
    assert report["gradsum"]["link_share"] == 0.5 / 8
    assert report["rate_against_gloo"] == 1.0
    assert "1 wrong elements" in err


def test_a_failed_run_shows_its_output_and_keeps_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(monkeypatch, "import sys; print('rank 1 fell over'); sys.exit(4)")
    assert bench.run(arguments()) == 4
    assert "rank 1 fell over" in capsys.readouterr().err


def test_a_run_without_result_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, "pass")
    assert bench.run(arguments()) == 1


def test_a_run_that_does_not_end_is_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(monkeypatch, "import signal; signal.pause()")
    assert bench.run(arguments("--timeout", "1")) == 1
    assert "not finished after 1 seconds" in capsys.readouterr().err


def for_real(*words: str) -> subprocess.CompletedProcess[str]:
    small = "bench push-pull --workers 2 --servers 2 --mb 4 --tensors 5 --rounds 3 --warmup 1"
    return subprocess.run(
        [sys.executable, "-m", "gradsum", *small.split(), *words],
        capture_output=True,
        text=True,
        timeout=45,
        check=False,
    )


@pytest.mark.slow
def test_processes_for_real_against_gloo_and_ddp() -> None:
    done = for_real("--against", "both", "--transport", "tcp", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong_elements"] == {"gradsum": 0, "gloo": 0, "ddp": 0}
    assert report["bytes"] == 4_000_000
    assert set(report["links"].values()) <= {"tcp"}
    for name in ("gradsum", "gloo", "ddp"):
        row = report[name]
        assert len(row["round_seconds"]) == 3
        assert min(row["round_seconds"]) <= row["median_seconds"] <= max(row["round_seconds"])
        assert row["link_share"] > 0
        assert len(row["minor_faults"]) == len(row["cpu_seconds"]) == 2
        assert min(row["cpu_seconds"]) > 0
    assert report["rate_against_gloo"] > 0 and report["rate_against_ddp"] > 0


@pytest.mark.slow
def test_processes_for_real_with_halves_and_gradients() -> None:
    done = for_real("--form", "gradients", "--wire", "fp16")
    assert done.returncode == 0, done.stderr
    assert "2 workers, 2 servers, 4 MB of float32 in 5 tensors" in done.stdout
    assert "form gradients, wire fp16" in done.stdout
    assert "every element of every round is right" in done.stdout
