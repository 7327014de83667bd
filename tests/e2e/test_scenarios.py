"""The scenarios over real processes: one crew plays all that are selected, each is a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import job
from tests.e2e.scenarios import collect
from tests.e2e.stage import Scenario

LIMIT = 150.0
SCENARIOS = collect()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 60)]


@pytest.fixture(scope="session")
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> job.Outcome:
    """What the crew reported on all selected scenarios."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = {call.params["name"] for call in calls if call and "name" in call.params}
    scenarios = [s for name, s in SCENARIOS.items() if name in chosen]
    folder: Path = tmp_path_factory.mktemp("crew")
    return job.run(scenarios, folder, LIMIT)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if what.long else [])
        for name, what in SCENARIOS.items()
    ],
)
def test_scenario(name: str, outcome: job.Outcome) -> None:
    require_good(SCENARIOS[name], outcome)


def require_good(what: Scenario, outcome: job.Outcome) -> None:
    """Fail unless every rank played the scenario, without error and with the same result."""
    name = what.name
    records = [outcome.records.get((name, rank)) for rank in range(what.ranks)]
    missing = [rank for rank, record in enumerate(records) if record is None]
    assert not missing, f"ranks {missing} hung or died: {[outcome.logs.get(r) for r in missing]}"
    errors = [f"rank {r}:\n{rec['error']}" for r, rec in enumerate(records) if rec and rec["error"]]
    assert not errors, "\n".join(errors)
    values = [record["value"] for record in records if record]
    assert all(value == values[0] for value in values), f"ranks differ: {values}"


def test_services_stay_well(outcome: job.Outcome) -> None:
    assert not outcome.complaints, "\n".join(outcome.complaints)


ONE_JOB = """c02_ranks_agree_about_skipping c05_schedulers_accept_the_wrapped_optimizer
c22_unused_parameters_do_not_move
c29_accumulation_windows
c40_unfrozen_and_added_parameters c50_activation_checkpointing_of_a_shared_layer
c64_no_sync_around_backward_only c71_memory_layouts_differ_between_ranks
c95_step_with_a_closure parameters_used_on_some_ranks_only several_dtypes_in_one_optimizer
packing_begins_at_the_first_fence""".split()


def test_one_job_of_the_launcher_with_many_optimizers(tmp_path: Path) -> None:
    chosen = [SCENARIOS[f"{name}[2-plain]"] for name in ONE_JOB]
    outcome = job.launch(chosen, tmp_path, 60.0)
    for what in chosen:
        require_good(what, outcome)
    assert not outcome.complaints, "\n".join([*outcome.complaints, *outcome.logs.values()])
