"""The user's words become a command that exists, or an error that says what does not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from gradsum.deploy.command import resolve
from gradsum.errors import ConfigError

PYTHON = [sys.executable, "-u"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--lr", "3"], [*PYTHON, "train.py", "--lr", "3"]),
        (["python", "train.py"], [*PYTHON, "train.py"]),
        (["python3", "-X", "dev", "-W", "error", "train.py", "x"],
         [*PYTHON, "-X", "dev", "-W", "error", "train.py", "x"]),
        (["python", "-c", "missing.py"], [*PYTHON, "-c", "missing.py"]),
        (["python", "-m", "app"], [*PYTHON, "-m", "app"]),
        (["python", "-"], [*PYTHON, "-"]),
        (["app"], [*PYTHON, "app"]),
        (["sh", "-c", "a 'b'"], [str(shutil.which("sh")), "-c", "a 'b'"]),
    ],
)  # fmt: skip
def test_commands(words: list[str], expected: list[str]) -> None:
    assert resolve(words) == expected


def test_module_and_program() -> None:
    assert resolve(["app", "x"], module=True) == [*PYTHON, "-m", "app", "x"]
    assert resolve(["sh", "train.py"], no_python=True)[1:] == ["train.py"]


@pytest.mark.parametrize(
    "words", [["missing.py"], ["python", "missing.py"], ["python", "-u", "missing.py"], ["nothing"]]
)
def test_what_does_not_exist_is_named(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"'{words[-1]}' does not exist"):
        resolve(words)


def test_nothing_to_run() -> None:
    with pytest.raises(ConfigError, match="nothing to run"):
        resolve([])


def test_unknown_program() -> None:
    with pytest.raises(ConfigError, match="program 'train.py' is not found"):
        resolve(["train.py"], no_python=True)
