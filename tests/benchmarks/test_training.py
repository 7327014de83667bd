"""The training benchmark over real processes: it finds wrong sums, and both ways to step agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import CASES
from benchmarks.place import worker_words
from benchmarks.report import FRAME, LATENCY, figures, line
from benchmarks.training import Pace, Timed
from gradsum.scheduler.fluid import optimum
from gradsum.scheduler.profiles import Layer, parse, profile
from gradsum.scheduler.simulator.cluster import Cluster
from gradsum.scheduler.simulator.run import simulate
from tests.deploy.processes import Processes

ROOT = Path(__file__).resolve().parents[2]


def test_the_weights_after_some_steps() -> None:
    """Three ranks' means: 2, 3, 4, 2, ... times place modulo 7."""
    paces = [Pace(rank, 3) for rank in range(3)]
    total = 0.0
    for step in range(5):
        for pace in paces:
            pace.step = step
        total += sum(pace.factor() for pace in paces) / 3
    assert paces[0].total(5) == pytest.approx(total) == 2 + 3 + 4 + 2 + 3
    layer = Timed(Layer("a", (9, 2), 0.0, 0.0), paces[0])
    assert layer.wrong(0.0) == 0
    for weight, place in zip(layer.parameters(), layer.places, strict=True):
        weight.data = -total * place
    assert layer.wrong(total) == 0
    next(layer.parameters()).data[4] += 1
    assert layer.wrong(total) == 1


def run(module: str, result: Path, ranks: int, *words: str) -> Any:
    """What rank 0 of a benchmark program writes."""
    command = ["launch", "--standalone", "--nproc-per-node", str(ranks), "--servers", "2", "--"]
    command += [sys.executable, "-m", module, *words, "--result", str(result)]
    processes = Processes(ROOT)
    try:
        code, out, err = processes.end(processes.gradsum(*command))
    finally:
        processes.close()
    assert code == 0, out + err
    return json.loads(result.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--barrier"]])
def test_two_ranks_train_and_no_element_is_wrong(more: list[str], tmp_path: Path) -> None:
    words = ["--model", "resnet50", "--bytes", "2000000", "--compute", "0.05"]
    words += ["--contender", "gradsum", "--warmup", "2", "--steps", "3", *more]
    found = run("benchmarks.training", tmp_path / "result.json", 2, *words)
    seconds = found["contenders"]["gradsum"]["seconds"]
    assert len(seconds) == 5 and min(seconds) >= 0.05
    assert found["contenders"]["gradsum"]["wrong"] == 0
    assert found["bulk"] > 0


@pytest.mark.slow
def test_urgent_sums_overtake_a_backlog_and_no_element_is_wrong(tmp_path: Path) -> None:
    words = ["--bytes", "4000000", "--warmup", "2", "--steps", "6"]
    found = run("benchmarks.urgent", tmp_path / "r.json", 3, *words)
    assert found["contenders"]["gradsum"]["wrong"] == 0
    assert len(found["contenders"]["gradsum"]["seconds"]) >= 1
    assert found["backlog"] > 0


@pytest.mark.slow
def test_a_real_model_has_the_same_losses_with_and_without_the_barrier(tmp_path: Path) -> None:
    words = ["--warmup", "1", "--steps", "3", "--width", "32", "--layers", "1"]
    found = run("benchmarks.transformer", tmp_path / "r.json", 2, *words)
    assert {name: len(each["seconds"]) for name, each in found["contenders"].items()} == {
        "barrier": 4, "gradsum": 4
    }  # fmt: skip
    assert found["contenders"]["gradsum"]["wrong"] == 0
    assert found["losses"][1] < found["losses"][0]
    layers = parse(json.dumps(found["profile"]), "profile").layers
    names = [layer.name for layer in layers]
    assert names[0].startswith("letters") or "blocks.0.qkv" in names
    assert sum(layer.nbytes for layer in layers) > 4 * 12 * 32 * 32
    assert all(layer.forward > 0 for layer in layers)


def test_figures_of_a_training_case() -> None:
    case = CASES["train-vgg16-1"]
    assert "benchmarks.training" in worker_words(case, Path("x"), 1.25)
    measured: dict[str, Any] = {
        "contenders": {"gradsum": {"seconds": [9.0, 1.5, 1.4, 1.6], "wrong": 0}},
        "links": {"0": "tcp"}, "usage": {}, "servers": {}, "idle": 0.5, "interfaces": {},
        "link": {"before": 24e6, "after": 26e6}, "compute": 1.25, "bulk": 1.3,
    }  # fmt: skip
    found = figures(case, measured, warmup=1)
    shape = profile("vgg16").shrunk(32_000_000).paced(1.25)
    best = optimum(shape, 4, 4, 32e6 / 1.3)
    assert found["optimum"] == pytest.approx(best / 1.5)
    cluster = Cluster.equal(4, 4, 25e6, latency=LATENCY, frame=FRAME)
    assert found["predicted"] == pytest.approx(simulate(shape, cluster).seconds / 1.5)
    assert "optimum" in line(found) and "NOT REACHED" in line(found)
