"""Tuning with real processes: many plans come and go, and not a bit of the weights differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradsum.scheduler.record import parse
from gradsum.scheduler.tuner import AGAIN, POINTS
from tests.e2e.daemons import OTHERS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STEPS = 800
LIMIT = 120.0


def weights(folder: Path, pause: float, *options: str) -> list[str]:
    """Train with two workers and one server; the weights of each rank."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(OTHERS)}
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "gradsum", "launch", "--standalone", "--nproc-per-node", "2",
         "--servers", "1", "--heartbeat", "0.05", *options, "--",
         "python", str(ROOT / "tests" / "e2e" / "tuned.py"), str(STEPS), str(pause)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.split()[-1] for line in done.stdout.splitlines() if "weights " in line]


def test_a_tuned_run_ends_with_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    """The file is written when the search has ended: all ranks have passed its fences."""
    file = tmp_path / "tune.json"
    tuned = weights(tmp_path, 0.005, "--tune", "--tune-file", str(file))
    (record,) = parse(file.read_text(encoding="utf-8")).values()
    assert record.points in (POINTS, AGAIN)  # AGAIN: a busy machine was taken for another link
    assert record.seconds > 0.005
    plain = weights(tmp_path, 0.0)
    assert len(tuned) == len(plain) == 2
    assert len(set(tuned + plain)) == 1
