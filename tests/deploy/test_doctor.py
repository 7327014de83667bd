"""``gradsum doctor``: each check sees what it should, and says what to do."""

from __future__ import annotations

import importlib.metadata
import json
import resource
from typing import Any

import pytest

from gradsum.config import Settings, load
from gradsum.deploy import doctor
from gradsum.deploy.doctor import FAIL, OK, WARN, Finding, Look
from gradsum.proto.transport.ports import free_port


def look(settings: Settings | None = None) -> Look:
    return Look(settings or Settings(), 1.0)


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in found}


def test_this_machine_passes() -> None:
    found = by_name(doctor.examine(look()))
    assert {"python", "torch", "pyzmq", "libzmq", "numpy", "cores", "memory", "open files",
            "shared memory", "listen", "coordinator"} <= set(found)  # fmt: skip
    assert [f for f in found.values() if f.level == FAIL] == []


def test_settings_are_shown_with_origin(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load({"lease": "20"}, {"GRADSUM_STALL_TIMEOUT": "60"})
    assert doctor.run(settings, 1.0, as_json=True) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["settings"]}
    assert (rows["lease"]["value"], rows["lease"]["origin"]) == (20.0, "flag --lease")
    assert (rows["stall_timeout"]["value"], rows["stall_timeout"]["origin"]) == (
        60.0, "GRADSUM_STALL_TIMEOUT")  # fmt: skip
    timeouts = {n for n in rows if n.endswith("timeout")}
    assert len(timeouts) == 5


def test_text_names_settings_and_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(load({}, {"GRADSUM_LEASES": "3"}), 1.0, as_json=False) == 0
    text = capsys.readouterr().out
    assert "warn  variables: GRADSUM_LEASES means nothing to gradsum" in text
    assert "hint: did you mean GRADSUM_LEASE?" in text
    assert "stall_timeout" in text


def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 4096))
    (finding,) = doctor._files(look())
    assert (finding.level, "256" in finding.text, "ulimit -n" in finding.hint) == (WARN, True, True)


def test_an_address_of_another_machine_is_a_failure() -> None:
    found = list(doctor._listening(look(Settings(bind="192.0.2.1"))))
    assert [f.level for f in found] == [OK, FAIL, WARN]
    assert "192.0.2.1" in found[1].text


def test_a_missing_package_is_a_failure_unless_it_is_optional(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    levels = {f.name: f.level for f in doctor._packages(look())}
    assert (levels["torch"], levels["uvloop"], levels["numpy"]) == (WARN, WARN, FAIL)


def test_an_unreachable_coordinator_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert doctor.run(load({"coordinator": address}, {}), 0.3, as_json=True) == 1
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert found["coordinator"]["level"] == FAIL
    assert address in found["coordinator"]["text"]
    assert "gradsum coordinator" in found["coordinator"]["hint"]


@pytest.mark.slow
def test_a_real_coordinator_is_reached_and_says_who_is_missing(coordinator: str) -> None:
    found = by_name(list(doctor._service(look(load({"coordinator": coordinator}, {})))))
    assert found["coordinator"].level == OK
    assert found["members"].level == WARN
    assert "1 of 1 servers" in found["members"].text


def server(**changes: Any) -> dict[str, Any]:
    known = {"index": 2, "host": "node2", "address": "tcp://127.0.0.1:1", "age": 0.1}
    return known | {"connected": True} | changes


def test_both_directions_to_a_server_are_looked_at() -> None:
    closed = server(address=f"tcp://127.0.0.1:{free_port()}")
    finding = doctor._server(closed, "127.0.0.1:7700", look())
    assert (finding.name, finding.level) == ("server 2", FAIL)
    assert "cannot be reached" in finding.text
    silent = doctor._server(server(age=9.0), "127.0.0.1:7700", look())
    assert (silent.level, "9.0 s ago" in silent.text) == (FAIL, True)
    wrong = doctor._server(server(), "192.0.2.7:7700", look())
    assert (wrong.level, "--advertise" in wrong.hint) == (FAIL, True)


def test_a_server_that_is_reached(coordinator: str) -> None:
    listening = server(address=f"tcp://{coordinator}")
    assert doctor._server(listening, "127.0.0.1:7700", look()).level == OK
