"""``gradsum bench push-pull``: how fast the service sums, on this machine, with every sum checked.

Starts a coordinator, servers and workers through the standalone launcher, and reports the median
and the 99th percentile of the rounds after the warm-up. Goodput is the bytes of one rank's tensors
by the median time. Exits with 1 if a single element of any round, warm-up included, is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

_GRACE: Final = 20.0  # seconds the launcher has to end its processes
_MAX_WORKERS: Final = 250
_MAX_MB: Final = 1_000_000


class Figures(NamedTuple):
    """The timed rounds of one contender. Seconds, and 10^9 bytes per second."""

    median: float
    p99: float
    goodput: float
    rounds: tuple[float, ...]


def figures(seconds: Sequence[float], total_bytes: int) -> Figures:
    """Of rounds that moved ``total_bytes`` each; the p99 is by nearest rank."""
    ordered = sorted(seconds)
    median = statistics.median(ordered)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return Figures(median, p99, total_bytes / median / 1e9, tuple(seconds))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``gradsum bench``."""
    parser.add_argument("what", choices=["push-pull"], help="what to measure")
    parser.add_argument("--workers", type=_whole(1, _MAX_WORKERS), default=2)
    parser.add_argument("--servers", type=_whole(1, 1000), default=1)
    parser.add_argument(
        "--mb", type=_megabytes, default=100.0, help="float32 per worker and round, in 10^6 bytes"
    )
    parser.add_argument(
        "--tensors", type=_whole(1, 10_000), default=16, help="equal tensors that make up the bytes"
    )
    parser.add_argument("--rounds", type=_whole(1, 1_000_000), default=20)
    parser.add_argument(
        "--warmup", type=_whole(0, 1_000_000), default=3, help="rounds checked but not timed"
    )
    parser.add_argument("--transport", choices=["tcp"], default="tcp")
    parser.add_argument(
        "--against", choices=["gloo"], help="take turns with torch.distributed in the same run"
    )
    parser.add_argument(
        "--timeout", type=_whole(1, 86_400), default=600, help="seconds until the run is ended"
    )
    parser.add_argument("--json", action="store_true", help="all figures, every round, as JSON")


def _whole(low: int, high: int) -> Any:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return read


def _megabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MAX_MB:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, at most {_MAX_MB}")
    return value


def run(args: argparse.Namespace) -> int:
    """0 if every element was right, 1 if not, else the launcher's exit code."""
    total_bytes = max(round(args.mb * 1e6) // 4, args.tensors) * 4  # one element each at least
    with tempfile.TemporaryDirectory(prefix="gradsum-bench-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        code = _launch(command(args, total_bytes, result), log, args.timeout)
        output = log.read_text(encoding="utf-8", errors="replace")
        measured = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
    if code or measured is None:
        print(output, file=sys.stderr, end="")
        print(f"gradsum bench: the run failed with exit code {code}", file=sys.stderr)
        return code or 1
    wrong = sum(contender["wrong"] for contender in measured.values())
    report = summary(args, total_bytes, measured)
    print(json.dumps(report) if args.json else table(report), flush=True)
    if wrong:
        print(output, file=sys.stderr, end="")
        print(f"gradsum bench: {wrong} wrong elements", file=sys.stderr)
    return 1 if wrong else 0


def command(args: argparse.Namespace, total_bytes: int, result: Path) -> list[str]:
    """The launcher's command line."""
    worker = [sys.executable, "-m", "gradsum.deploy.bench_worker"]
    worker += ["--bytes", str(total_bytes), "--tensors", str(args.tensors)]
    worker += ["--rounds", str(args.warmup + args.rounds), "--result", str(result)]
    if args.against == "gloo":
        worker.append("--gloo")
    launcher = [sys.executable, "-m", "gradsum", "launch", "--standalone"]
    launcher += ["--nproc-per-node", str(args.workers), "--servers", str(args.servers)]
    return [*launcher, "--", *worker]


def _launch(words: Sequence[str], log: Path, timeout: float) -> int:
    """Run to the end, or end it after ``timeout`` seconds; its output goes to ``log``."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (
        log.open("wb") as out,
        subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment) as child,
    ):
        try:
            return child.wait(timeout)
        except subprocess.TimeoutExpired:
            out.write(f"not finished after {timeout} seconds (--timeout)\n".encode())
            return 1
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(_GRACE)
                except subprocess.TimeoutExpired:
                    child.kill()


def summary(
    args: argparse.Namespace, total_bytes: int, measured: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """What ``--json`` prints."""
    report: dict[str, Any] = {
        "workers": args.workers,
        "servers": args.servers,
        "bytes": total_bytes,
        "tensors": args.tensors,
        "transport": args.transport,
        "warmup": args.warmup,
        "rounds": args.rounds,
        "wrong_elements": {name: found["wrong"] for name, found in measured.items()},
    }
    for name, found in measured.items():
        timed = figures(found["seconds"][args.warmup :], total_bytes)
        report[name] = {
            "median_seconds": timed.median,
            "p99_seconds": timed.p99,
            "goodput_gb_per_second": timed.goodput,
            "round_seconds": timed.rounds,
        }
    if "gloo" in measured:
        report["rate_against_gloo"] = (
            report["gloo"]["median_seconds"] / report["gradsum"]["median_seconds"]
        )
    return report


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"push-pull: workers {report['workers']}, servers {report['servers']}, "
        f"{report['bytes'] / 1e6:.1f} MB of float32 in {report['tensors']} tensors, "
        f"{report['transport']}; {report['rounds']} rounds after {report['warmup']} of warm-up",
        f"{'':10}{'median':>12}{'p99':>12}{'goodput':>14}",
    ]
    for name in report["wrong_elements"]:
        row = report[name]
        lines.append(
            f"{name:10}{row['median_seconds'] * 1e3:>9.2f} ms{row['p99_seconds'] * 1e3:>9.2f} ms"
            f"{row['goodput_gb_per_second']:>9.3f} GB/s"
        )
    if "rate_against_gloo" in report:
        lines.append(f"gradsum runs at {report['rate_against_gloo']:.2f} of Gloo's rate")
    if not any(report["wrong_elements"].values()):
        lines.append("every element of every round is right")
    return "\n".join(lines)
