"""``python -m benchmarks``: measure cases, one after the other, and say what was reached."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import place, report
from benchmarks.cases import CASES, Case
from benchmarks.links import Unavailable, remove_dead, require

SKIPPED = 77


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; ends the process with 2 for wrong ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure cases")
    running.add_argument("cases", nargs="*", metavar="CASE", help="names, or beginnings of names")
    running.add_argument("--all", action="store_true", help="every case")
    running.add_argument("--repeat", type=int, default=1, help="runs of each; medians are shown")
    running.add_argument("--rounds", type=int, help="timed rounds of a run")
    running.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE[,VALUE]",
        help="a setting, such as slice_bytes=64KiB,1MiB: one run each",
    )  # fmt: skip
    running.add_argument("--out", type=Path, metavar="FILE", help="write everything as JSON")
    running.add_argument("--json", action="store_true", help="print JSON instead of lines")
    commands.add_parser("list", help="the cases and what is owed")
    commands.add_parser("clean", help="remove labs that killed runs have left")
    return parser.parse_args(words)


def chosen(args: argparse.Namespace) -> list[Case]:
    """The cases asked for, under the settings asked for."""
    names = [n for n in CASES if args.all or any(_names(each, n) for each in args.cases)]
    cases = [CASES[name] for name in names]
    for setting in args.set:
        name, _, values = setting.partition("=")
        cases = [case.with_settings(**{name.upper(): value})
                 for case in cases for value in values.split(",")]  # fmt: skip
    return cases


def _names(word: str, case: str) -> bool:
    """Whether a word is a case's name, or the beginning of it and no case's name."""
    return word == case or (word not in CASES and case.startswith(word))


def run(args: argparse.Namespace) -> int:
    """0 when all that is owed was reached, 1 if not, 77 when nothing could be measured here."""
    found: list[dict[str, Any]] = []
    for case in chosen(args):
        if args.rounds:
            case = replace(case, rounds=args.rounds)
        if case.place == "links":
            try:
                require()
            except Unavailable as why:
                print(f"{case.name}: skipped, {why}", file=sys.stderr, flush=True)
                continue
        runs = []
        for number in range(args.repeat):
            print(f"{case.name} {dict(case.settings)} run {number + 1} of {args.repeat}",
                  file=sys.stderr, flush=True)  # fmt: skip
            runs.append(report.figures(case, place.measure(case), place.WARMUP))
        found.append(report.merge(runs))
        if not args.json:
            print(report.line(found[-1]), dict(case.settings) or "", flush=True)
    machine = {"kernel": platform.release(), "python": platform.python_version()}
    everything = {"machine": machine, "cases": found}
    if args.json:
        print(json.dumps(everything))
    if args.out:
        args.out.write_text(json.dumps(everything, indent=1), encoding="utf-8")
    if not found:
        return SKIPPED
    return 0 if all(map(report.reached, found)) else 1


def main(words: Sequence[str] | None = None) -> int:
    """Exit code of the command."""
    args = parse(words)
    try:
        if args.command == "list":
            for case in CASES.values():
                print(f"{case.name:28} {case.workers} workers, {case.servers} servers, "
                      f"{case.nbytes / 1e6:g} MB; owed {dict(case.owed)}")  # fmt: skip
            return 0
        if args.command == "clean":
            print("removed:", *remove_dead())
            return 0
        return run(args)
    except (Unavailable, place.Failed) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return SKIPPED if isinstance(error, Unavailable) else 1


if __name__ == "__main__":
    sys.exit(main())
