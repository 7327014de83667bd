"""The simulator finds planted bugs within 1,000 seeds; the real code passes the same seeds."""

from __future__ import annotations

import pytest

from tests.sim.cluster import run
from tests.sim.mutants import MUTANTS
from tests.sim.workload import draw

SEEDS = 1_000


def first_failure(seeds: int) -> tuple[int, Exception] | None:
    """The first seed that fails and how; None when all pass."""
    for seed in range(seeds):
        try:
            run(draw(seed))
        except Exception as error:  # a wrong value, a hang, or whatever escaped
            return seed, error
    return None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name](patch)
        found = first_failure(SEEDS)
    assert found is not None, f"{name} lives through {SEEDS} seeds"
    seed, error = found
    print(f"{name}: seed {seed}, {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    run(draw(seed))  # without the planted bug the seed passes


def test_enough_bugs_are_planted() -> None:
    assert len(MUTANTS) >= 10


@pytest.mark.long
@pytest.mark.timeout(0)
def test_the_real_code_passes_the_same_seeds() -> None:
    assert first_failure(SEEDS) is None
