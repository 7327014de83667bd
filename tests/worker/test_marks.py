"""Marks appear in torch's profile, and cost one look while nobody profiles."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gradsum.config import load
from gradsum.worker import default
from gradsum.worker.marks import marked
from gradsum.worker.optimizer import wrap


@marked("gradsum::test")
def double(number: int, *, more: int = 0) -> int:
    """Twice the number."""
    return 2 * number + more


def test_a_mark_changes_neither_results_nor_names() -> None:
    assert double(3, more=1) == 7
    assert (double.__name__, double.__doc__) == ("double", "Twice the number.")


def test_nothing_is_entered_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", fail)
    assert double(3) == 6


@pytest.mark.slow
def test_a_training_step_shows_pushes_waits_and_the_synchronisation() -> None:
    home = default.Default()
    home.open(load({"world_size": 1}, {}))
    try:
        model = torch.nn.Linear(3, 1)
        optimizer = wrap(
            home.get(), torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
    finally:
        home.close()
    counts = {e.key: e.count for e in seen.key_averages() if e.key.startswith("gradsum::")}
    assert counts == {"gradsum::push": 4, "gradsum::wait": 4, "gradsum::synchronize": 2}
