"""What the user wants to run, as an argument list; refused here if it cannot be started."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from gradsum.errors import ConfigError

_PYTHON = (sys.executable, "-u")  # -u: lines reach the launcher when they are printed
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def resolve(words: Sequence[str], *, module: bool = False, no_python: bool = False) -> list[str]:
    """The full command: this Python for ``python``, for a script and for ``-m``; else a program.

    Raises ConfigError for an empty command, a script that does not exist or an unknown program.
    """
    if not words:
        raise ConfigError("nothing to run", hint="gradsum launch ... -- python train.py")
    if module:
        return [*_PYTHON, "-m", *words]
    if no_python:
        return [_program(words[0]), *words[1:]]
    if words[0] in ("python", "python3"):
        _check_script(_script(words[1:]))
        return [*_PYTHON, *words[1:]]
    if words[0].endswith(".py") or not shutil.which(words[0]):
        _check_script(words[0])
        return [*_PYTHON, *words]
    return [_program(words[0]), *words[1:]]


def _program(word: str) -> str:
    found = shutil.which(word)
    if found is None:
        raise ConfigError(f"program {word!r} is not found", hint="check the name and PATH")
    return found


def _script(arguments: Sequence[str]) -> str | None:
    """The script among the arguments of an interpreter; None for -c, -m, - and nothing."""
    words = iter(arguments)
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif word in ("-", "-c", "-m"):
            return None
        elif not word.startswith("-"):
            return word
    return None


def _check_script(name: str | None) -> None:
    if name is None:
        return
    path = Path(name)
    if path.is_dir() and (path / "__main__.py").is_file():
        return
    if not path.is_file():
        raise ConfigError(f"script {name!r} does not exist", hint=f"looked in {Path.cwd()}")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"script {name!r} cannot be read", hint="check its permissions")
