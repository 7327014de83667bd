"""The examples as a person would start them: real processes, real data, checked results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "examples/digits.py")
LIMIT = 120  # seconds


def run(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run to the end. After the limit the command is asked to stop, then its group is killed."""
    child = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        child.terminate()
        try:
            out, err = child.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            out, err = child.communicate()
        pytest.fail(f"not finished after {LIMIT} s\n{out}\n{err}")
    return subprocess.CompletedProcess(words, child.returncode, out, err)


def launch(
    workers: int, *script: str, servers: int = 2, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script by the standalone launcher."""
    launcher = [sys.executable, "-m", "gradsum", "launch", "--standalone"]
    launcher += ["--nproc-per-node", str(workers), "--servers", str(servers)]
    return run([*launcher, "--", sys.executable, *script], **variables)


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one line of JSON that rank 0 printed, behind the launcher's prefix."""
    lines = [line for line in done.stdout.splitlines() if '{"' in line]
    assert len(lines) == 1, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(lines[0][lines[0].index("{") :])
    return found


def test_digits_two_workers_equal_one_process_bit_for_bit() -> None:
    done = launch(2, DIGITS, "--compare", "--json", "--epochs", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    result = result_of(done)
    assert result["workers"] == 2
    assert result["accuracy"] > 0.95
    assert "bit for bit" in result["weights"]
    assert result["steps"] == 6 * (1500 // 32)
    parameters = (1 * 9 + 1) * 16 + (16 * 9 + 1) * 32 + (512 + 1) * 64 + (64 + 1) * 10
    assert result["bytes_pushed"] == 4 * parameters * result["steps"]
    assert result["seconds"] < 60


def test_digits_three_workers_agree_within_1e_5() -> None:
    done = launch(3, DIGITS, "--compare", "--json", "--epochs", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_of(done)["agree"]


def test_digits_three_workers_in_rank_order_are_equal_bit_for_bit() -> None:
    done = launch(3, DIGITS, "--compare", "--json", "--epochs", "6", GRADSUM_DETERMINISTIC="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in result_of(done)["weights"]


PLANT = """
import runpy, sys, gradsum
wrap = gradsum.DistributedOptimizer
def planted(optimizer, named_parameters):
    named = list(named_parameters)
    if gradsum.rank() == 1:
        named[-1][1].register_hook(lambda gradient: gradient * {factor})
    return wrap(optimizer, named_parameters=named)
gradsum.DistributedOptimizer = planted
sys.argv = ["digits.py", "--compare", "--json", "--epochs", "6"]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    "workers, factor", [(2, "(1 + 2**-20)"), pytest.param(3, "1.01", marks=pytest.mark.long)]
)
def test_digits_comparison_sees_a_wrong_gradient_of_one_rank(
    tmp_path: Path, workers: int, factor: str
) -> None:
    script = tmp_path / "planted.py"
    script.write_text(PLANT.format(script=DIGITS, factor=factor))
    done = launch(workers, str(script))
    assert done.returncode == 1, done.stdout + done.stderr
    result = result_of(done)
    assert result["accuracy"] > 0.95
    assert not result["agree"]
    assert "DIFFERENT" in result["weights"]


def test_digits_alone_needs_no_launcher() -> None:
    done = run([sys.executable, DIGITS, "--compare"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout
    assert "training" in done.stderr, "the progress bar"


def test_digits_fails_when_it_has_not_learnt() -> None:
    done = run([sys.executable, DIGITS, "--epochs", "1", "--json"])
    assert done.returncode == 1
    assert result_of(done)["accuracy"] <= 0.95
    assert "not above 95%" in done.stderr


def test_char_transformer_learns() -> None:
    done = launch(2, str(ROOT / "examples/char_transformer.py"), "--steps", "40", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = result_of(done)
    assert result["tokens"] == 40 * 16 * 64 * 2
    assert len(result["losses"]) == 40
    assert result["losses"][0] > 4.3, "near ln 96 before the first step"
    assert sum(result["losses"][-5:]) / 5 < 3.2
    assert len(result["sample"]) == len("def ") + 200


def test_smallest_finds_the_weights_on_every_rank() -> None:
    done = launch(2, str(ROOT / "examples/smallest.py"), servers=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("weights [2.0, -3.0, 0.5] bias 1.0") == 2


def test_smallest_changes_five_places_of_a_plain_script() -> None:
    text = (ROOT / "examples/smallest.py").read_text()
    assert [f"# {n}:" in text for n in range(1, 7)] == [True] * 5 + [False]
