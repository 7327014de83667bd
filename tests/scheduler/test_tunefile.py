"""The tune_file: kept, read again, and ignored with a warning when it is broken."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gradsum.scheduler.record import Record, dump, fingerprint, parse
from gradsum.scheduler.tunefile import TuneFile
from gradsum.scheduler.tuner import Setting

RECORD = Record(fingerprint(b"\x01\xff", 2, 1), Setting(1 << 17, 4, 1 << 19), 0.25, "settled", 15)
ENTRY = '{"version": 1, "jobs": {"a": %s}}'


def test_what_is_kept_is_read_again_beside_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    other = RECORD.__class__("other", RECORD.setting, 1.5, "left alone", 3)
    TuneFile(path).keep(other)
    TuneFile(path).keep(RECORD)
    assert TuneFile(path).records == {"01ff-2w-1s": RECORD, "other": other}
    assert parse(dump({"other": other})) == {"other": other}
    assert [it.name for it in tmp_path.iterdir()] == ["tune.json"], "nothing is left beside it"


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"version": 2, "jobs": {}}', '{"version": 1}', "[" * 100_000,
        ENTRY % "7", ENTRY % '{"slice_bytes": 1}',
        ENTRY % '{"slice_bytes": 0, "window": 4, "pack_bytes": 1, "seconds": 1.0, '
                '"state": "settled", "points": 3}',
        ENTRY % '{"slice_bytes": 1, "window": 400, "pack_bytes": 1, "seconds": 1.0, '
                '"state": "settled", "points": 3}',
        ENTRY % '{"slice_bytes": 1, "window": 4, "pack_bytes": 1, "seconds": NaN, '
                '"state": "settled", "points": 3}',
    ],
)  # fmt: skip
def test_a_broken_file_is_named_ignored_and_written_anew(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tune.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "gradsum.coordinator"):
        kept = TuneFile(path)
    assert kept.records == {}
    assert [str(path) in line for line in caplog.messages] == [True]
    kept.keep(RECORD)
    assert TuneFile(path).records == {RECORD.fingerprint: RECORD}


def test_bytes_that_are_no_text_are_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert TuneFile(path).records == {}


def test_a_place_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "none" / "tune.json"
    with caplog.at_level(logging.WARNING, "gradsum.coordinator"):
        TuneFile(path).keep(RECORD)
    assert any("cannot be written" in line and str(path) in line for line in caplog.messages)
