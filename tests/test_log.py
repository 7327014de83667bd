"""Log lines name the speaker, and a flood of one kind stays one line an interval."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from gradsum import log


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    logger = logging.getLogger(log.ROOT)
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_text_line_has_prefix_level_and_name(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("INFO", "text", "[w3]")
    logging.getLogger("gradsum.worker.session").warning("rank %d is late", 7)
    line = capsys.readouterr().err
    assert line.startswith("[w3] ")
    assert line.endswith("WARNING worker.session: rank 7 is late\n")


def test_second_setup_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("INFO", "text", "[w?]")
    log.setup("INFO", "text", "[w3]").info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_level_is_respected(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.setup("WARNING", "text", "[s1]")
    logger.info("quiet")
    logger.error("loud")
    assert "quiet" not in (text := capsys.readouterr().err)
    assert "loud" in text


def test_json_line_carries_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.setup("DEBUG", "json", "[coordinator]")
    try:
        raise ValueError("no\nnewline may split this")
    except ValueError:
        logger.exception("it %s", "failed")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    entry = json.loads(lines[0])
    assert (entry["level"], entry["who"], entry["text"]) == ("ERROR", "coordinator", "it failed")
    assert "ValueError" in entry["error"]


def test_rate_limited_counts_what_it_held(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    limited = log.RateLimited(log.setup("INFO", "text", ""), 5.0, lambda: now[0])
    said = [limited.log(logging.WARNING, "junk", "junk from %s", "a") for _ in range(4)]
    assert said == [True, False, False, False]
    assert limited.log(logging.WARNING, "other", "another kind")
    now[0] += 5.0
    assert limited.log(logging.WARNING, "junk", "junk from %s", "b")
    text = capsys.readouterr().err
    assert "junk from b (and 3 more like it)" in text
    assert text.count("junk from a") == 1


def test_rate_limited_forgets_silent_keys() -> None:
    now = [0.0]
    limited = log.RateLimited(logging.getLogger("gradsum.quiet"), 1.0, lambda: now[0])
    for key in range(2000):
        now[0] += 1.0
        limited.log(logging.DEBUG, str(key), "x")
    assert len(limited._seen) <= 257
