"""What people train with, over gradsum: torch's own classes, Lightning, accelerate, the Trainer.

Under our launcher and under torchrun. The traces show that the service summed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import Daemons
from tests.e2e.test_examples import ROOT, launch, result_of, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FEWEST = 40
"""Sums of a run, at least."""


def script(name: str) -> str:
    return str(ROOT / f"examples/{name}_digits.py")


def summed(folder: Path, sums: int = FEWEST) -> None:
    """Fail unless both workers' traces show so many slices that were pushed and came back."""
    for rank in range(2):
        (file,) = folder.glob(f"worker-{rank}-*.json")
        events = json.loads(file.read_text())["traceEvents"]
        slices = [each for each in events if each.get("cat") == "queue"]
        assert len(slices) >= sums, f"rank {rank}: {len(slices)} slices"


@pytest.mark.parametrize(
    "style", [pytest.param("hook", marks=pytest.mark.long), "backend", "fsdp2"]
)
def test_torchs_own_classes_train_what_one_process_trains(style: str, tmp_path: Path) -> None:
    done = launch(2, script("torch"), "--style", style, GRADSUM_TRACE=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = result_of(done)
    assert found["accuracy"] > 0.95
    assert found["difference"] <= 1e-5
    if style != "fsdp2":  # its gradients are scattered: Gloo's part
        summed(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("framework", ["lightning", "accelerate", "trainer"])
def test_frameworks_train_the_digits(framework: str, tmp_path: Path) -> None:
    done = launch(2, script(framework), GRADSUM_TRACE=str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_of(done)["accuracy"] > 0.94
    summed(tmp_path)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[str]:
    """The address of a service of two servers, for two workers."""
    daemons = Daemons(tmp_path)
    try:
        (place,) = daemons.start({("plain", 2)}).values()
        assert place.coordinator is not None
        yield place.coordinator
        assert not daemons.complaints()
    finally:
        daemons.end()


@pytest.mark.parametrize("name", ["torch", "accelerate", "lightning", "trainer"])
def test_under_torchrun_the_coordinators_address_is_all_it_takes(
    name: str, coordinator: str, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*words, script(name)], GRADSUM_COORDINATOR=coordinator,
               GRADSUM_TRACE=str(tmp_path), HF_HUB_OFFLINE="1")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_of(done)["accuracy"] > 0.94
    summed(tmp_path)
