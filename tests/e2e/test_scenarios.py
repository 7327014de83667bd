"""The scenarios over real processes: one crew plays all that are selected, each is a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import job
from tests.e2e.scenarios import collect

LIMIT = 240.0
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


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, outcome: job.Outcome) -> None:
    what = SCENARIOS[name]
    records = [outcome.records.get((name, rank)) for rank in range(what.ranks)]
    missing = [rank for rank, record in enumerate(records) if record is None]
    assert not missing, f"ranks {missing} hung or died: {[outcome.logs.get(r) for r in missing]}"
    errors = [f"rank {r}:\n{rec['error']}" for r, rec in enumerate(records) if rec and rec["error"]]
    assert not errors, "\n".join(errors)
    values = [record["value"] for record in records if record]
    assert all(value == values[0] for value in values), f"ranks differ: {values}"


def test_services_stay_well(outcome: job.Outcome) -> None:
    assert not outcome.complaints, "\n".join(outcome.complaints)
