"""``python -m tests.oracle.run``: PyTorch's tests on gloo and on gradsum, and what differs.

Each test is a job of its own on a service that stands, of 8 processes; those that are skipped then
are tried with 4. A result is "passed", "skipped" with torch's
reason, or "failed" with the end of its traceback. Exit code 0: every test that passes with gloo
passes with gradsum, or is in EXCEPTIONS.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any, Final

from tests.oracle.exceptions import EXCEPTIONS

RANKS: Final = (8, 4)
WITHIN: Final = 30.0


class Service:
    """A coordinator and two servers."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder = folder
        self._ranks = ranks
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> str:
        file = self._folder / "address"
        words = ["coordinator", "--bind", "127.0.0.1:0", "--port-file", str(file)]
        self._start("coordinator", [*words, "--workers", str(self._ranks), "--servers", "2"])
        deadline = time.monotonic() + WITHIN
        while not file.exists():
            if time.monotonic() > deadline:
                raise RuntimeError("the coordinator did not start")
            time.sleep(0.05)
        address = file.read_text().strip()
        for number in range(2):
            self._start(f"server{number}", ["server", "--coordinator", address])
        return address

    def _start(self, name: str, words: list[str]) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "gradsum", *words]
            self._children.append(subprocess.Popen(command, stdout=log, stderr=log))

    def __exit__(self, *_: object) -> None:
        for child in reversed(self._children):
            child.terminate()
            child.wait(WITHIN)


class Results(unittest.TestResult):
    """One line and one entry for each test."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[str]] = {}
        self._since = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._since = time.monotonic()

    def _note(self, test: unittest.TestCase, how: str, why: str = "") -> None:
        name = test.id().rpartition(".")[2]
        self.found[name] = [how, why]
        seconds = time.monotonic() - self._since
        print(f"{how:8} {seconds:6.1f} s  {name}  {why[-160:]!r}", file=sys.stderr, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._note(test, "failed", self._exc_info_to_string(err, test)[-1500:])  # type: ignore[attr-defined]

    addError = addFailure


def play(only: list[str]) -> dict[str, list[str]]:
    """Run tests in this process's forks; results by name."""
    from tests.oracle.suite import Oracle

    names = only or unittest.TestLoader().getTestCaseNames(Oracle)
    results = Results()
    unittest.TestSuite(Oracle(name) for name in names).run(results)
    return results.found


def on(backend: str, only: list[str], ranks: int) -> dict[str, list[str]]:
    """Run tests on a backend, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.json")
        env = os.environ | {"ORACLE_BACKEND": backend, "ORACLE_RANKS": str(ranks)}
        env |= {"GRADSUM_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.oracle.run", "--play", str(file), *only]
        with Service(Path(folder), ranks) as address:
            subprocess.run(command, env=env | {"GRADSUM_COORDINATOR": address}, check=True)
        found: dict[str, list[str]] = json.loads(file.read_text())
        return found


def on_all(backend: str, only: list[str], ranks: list[int]) -> dict[str, list[str]]:
    """The same with several numbers of processes, each for what no earlier one could run."""
    found: dict[str, list[str]] = {}
    for each in ranks:
        rest = [name for name, (how, _) in found.items() if how == "skipped"] if found else only
        again = on(backend, rest, each) if rest or not found else {}
        found |= {name: it for name, it in again.items() if it[0] != "skipped" or name not in found}
    return found


def compare(gloo: dict[str, list[str]], ours: dict[str, list[str]]) -> list[str]:
    """What passes with gloo and not with gradsum, without a reason."""
    return [
        f"{name}: {ours[name][0]}\n{ours[name][1]}"
        for name, (how, _) in gloo.items()
        if how == "passed" and ours[name][0] != "passed" and name not in EXCEPTIONS
    ]


def counts(found: dict[str, list[str]]) -> str:
    """For people."""
    kinds = [how for how, _ in found.values()]
    return ", ".join(f"{kinds.count(how)} {how}" for how in ("passed", "skipped", "failed"))


def main() -> int:
    """0 when nothing differs without a reason."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.run", description=__doc__)
    parser.add_argument("tests", nargs="*", help="names; all by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), metavar="N",
                        help="processes of each test")  # fmt: skip
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all results as JSON")
    args = parser.parse_args()
    if args.play:
        args.play.write_text(json.dumps(play(args.tests)))
        return 0
    both = {backend: on_all(backend, args.tests, args.ranks) for backend in ("gloo", "gradsum")}
    if args.out:
        args.out.write_text(json.dumps(both, indent=1))
    for backend, found in both.items():
        print(f"{backend}: {counts(found)}")
    worse = compare(both["gloo"], both["gradsum"])
    print("\n".join(worse) or "every test that passes with gloo passes with gradsum")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
