"""``gradsum status`` and what it prints."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gradsum.config import load
from gradsum.deploy import status
from gradsum.errors import ConfigError, Unreachable
from gradsum.proto.transport.ports import free_port

COMMON = {"host": "a", "pid": 7, "state": "here", "age": 0.25, "epoch": 1, "connected": True}
PICTURE: dict[str, Any] = {
    "job": "digits", "workers": 2, "servers_expected": 1, "missing": "", "epoch": 1,
    "slice_bytes": 1 << 20, "tensors": 14, "bytes": 3 << 19,
    "gathers": {"barrier": [1]},
    "members": [
        {**COMMON, "rank": 0, "step": 30, "idle": 0.0},
        {**COMMON, "rank": 1, "step": 31, "idle": 0.0,
         "info": {"links": {"0": "shm", "1": "tcp", "2": "shm"}, "uplink": 23.6 * (1 << 20)}},
    ],
    "servers": [{**COMMON, "index": 0, "address": "tcp://127.0.0.1:7701", "weight": 1.0}],
}  # fmt: skip


def test_a_running_job_is_described_in_lines_and_tables() -> None:
    text = "\n".join(status.describe(PICTURE))
    assert "job      digits" in text
    assert "2 of 2 workers, 1 of 1 servers" in text
    assert "epoch 1, 14 tensors, 1.5 MiB, slices of 1 MiB" in text
    assert "barrier waits for ranks 1" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "a", "7", "here", "30", "1", "0.0", "0.2", "-", "-"] in rows
    info = ["shm", "x", "2,", "tcp", "x", "1", "23.6", "MiB/s"]
    assert ["1", "a", "7", "here", "31", "1", "0.0", "0.2", *info] in rows
    assert ["0", "a", "7", "here", "127.0.0.1:7701", "1", "1", "0.2"] in rows


def test_who_is_missing_is_said() -> None:
    picture = PICTURE | {"job": None, "members": [], "servers": [], "missing": "worker ranks 0-1"}
    text = "\n".join(status.describe(picture))
    assert "job      none" in text
    assert "waiting  worker ranks 0-1" in text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (5 << 40, "5 TiB")],
)
def test_amounts(number: int, text: str) -> None:
    assert status.amount(number) == text


@pytest.mark.slow
def test_a_real_coordinator_answers(coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = load({"coordinator": coordinator}, {})
    assert status.run(settings, 5.0, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["workers"], answer["servers_expected"], answer["job"]) == (2, 1, None)
    assert status.run(settings, 5.0, as_json=False) == 0
    assert "0 of 2 workers, 0 of 1 servers" in capsys.readouterr().out


def test_nobody_there_is_said_within_the_deadline() -> None:
    address = f"127.0.0.1:{free_port()}"
    start = time.monotonic()
    with pytest.raises(Unreachable, match=address):
        status.ask(address, 0.5)
    assert time.monotonic() - start < 3


def test_a_bad_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        status.ask("nowhere", 1.0)
