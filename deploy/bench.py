"""``gradsum bench push-pull``: how fast the service sums, on this machine, with every sum checked.

Probes a TCP stream and the memory, starts a coordinator, servers and workers through the standalone
launcher, and reports the rounds after the warm-up. What the figures mean is said in
``bench_report.py`` and by ``--help``. Exits with 1 if a single element of any round, warm-up
included, is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from gradsum.deploy.bench_numbers import MAX_RANKS
from gradsum.deploy.bench_probe import probe
from gradsum.deploy.bench_report import Job, report, table
from gradsum.errors import UsageError

_GRACE: Final = 20.0  # seconds the launcher has to end its processes
_MAX_MB: Final = 1_000_000
_AGAINST: Final = {"gloo": ("--gloo",), "ddp": ("--ddp",), "both": ("--gloo", "--ddp")}
_TRANSPORT: Final = "GRADSUM_TRANSPORT"

_MORE: Final = """\
figures:
  goodput   bytes of one rank's float32 tensors by the median time of a round
  of link   what one rank's link carries in each direction, by the median time and by the probed
            rate of a TCP stream over loopback, or of a memory copy when all of gradsum's links are
            shared memory; a service's link carries every byte once each way (half of them with a
            half type on the wire), a ring's 2 (n - 1) / n
  idle CPU  idle share of all processors of rank 0's machine during the rounds
  own CPU   processor time of one rank in a round; faults: its minor page faults; medians, and the
            rank with the most

One round trip of a small tensor: --mb 0.004096 --tensors 1

On machines of your own, with a running service, the launcher starts the ranks itself, on each
machine with its --node-rank; rank 0 prints the table, without probes:
  gradsum launch --coordinator HOST:PORT --nnodes N --node-rank R --nproc-per-node P -- \\
    python -m gradsum.deploy.bench_worker --bytes 100000000 --tensors 16 --rounds 23 --warmup 3
  (more: python -m gradsum.deploy.bench_worker --help)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``gradsum bench``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _MORE
    add = parser.add_argument
    add("what", choices=["push-pull"], help="what to measure")
    add("--workers", type=_whole(1, MAX_RANKS["fp32"]), default=2)
    add("--servers", type=_whole(1, 1000), default=1)
    add(
        "--mb",
        type=_megabytes,
        default=100.0,
        help="float32 per worker and round, in 10^6 bytes (default 100)",
    )
    add("--tensors", type=_whole(1, 10_000), default=16, help="equal tensors of these bytes")
    add("--rounds", type=_whole(1, 1_000_000), default=20)
    add("--warmup", type=_whole(0, 1_000_000), default=3, help="rounds checked but not timed")
    add(
        "--form",
        choices=["tensors", "gradients"],
        default="tensors",
        help="push_pull of plain tensors, or synchronize() of a DistributedOptimizer",
    )
    add("--wire", choices=list(MAX_RANKS), default="fp32", help="what gradsum's links carry")
    add(
        "--transport",
        choices=["auto", "tcp", "shm"],
        help="shared memory where peers are on one machine, never, or always (default: as set by "
        "GRADSUM_TRANSPORT, else auto)",
    )
    add(
        "--against",
        choices=list(_AGAINST),
        help="take turns, in the same processes, with all-reduce of torch.distributed over Gloo, "
        "with buckets of 25 MiB as DistributedDataParallel makes them, or with both",
    )
    add("--timeout", type=_whole(1, 86_400), default=600, help="seconds until the run is ended")
    add("--json", action="store_true", help="all figures, every round, as JSON")


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
    if args.workers > MAX_RANKS[args.wire]:
        raise UsageError(
            f"--workers {args.workers}: sums of {args.wire} can be checked for "
            f"{MAX_RANKS[args.wire]} workers at most",
            hint="fewer workers, or --wire fp32",
        )
    total_bytes = max(round(args.mb * 1e6) // 4, args.tensors) * 4  # one element each at least
    probed = probe()
    with tempfile.TemporaryDirectory(prefix="gradsum-bench-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        code = _launch(command(args, total_bytes, result), log, args)
        output = log.read_text(encoding="utf-8", errors="replace")
        measured = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
    if code or measured is None:
        print(output, file=sys.stderr, end="")
        print(f"gradsum bench: the run failed with exit code {code}", file=sys.stderr)
        return code or 1
    found = report(_job(args, total_bytes), measured, probed._asdict())
    print(json.dumps(found) if args.json else table(found), flush=True)
    wrong = sum(found["wrong_elements"].values())
    if wrong:
        print(output, file=sys.stderr, end="")
        print(f"gradsum bench: {wrong} wrong elements", file=sys.stderr)
    return 1 if wrong else 0


def _job(args: argparse.Namespace, total_bytes: int) -> Job:
    return Job(
        workers=args.workers,
        servers=args.servers,
        total_bytes=total_bytes,
        tensors=args.tensors,
        form=args.form,
        wire=args.wire,
        transport=args.transport or os.environ.get(_TRANSPORT, "auto"),
        warmup=args.warmup,
        rounds=args.rounds,
    )


def command(args: argparse.Namespace, total_bytes: int, result: Path) -> list[str]:
    """The launcher's command line."""
    worker = [sys.executable, "-m", "gradsum.deploy.bench_worker"]
    worker += ["--bytes", str(total_bytes), "--tensors", str(args.tensors)]
    worker += ["--rounds", str(args.warmup + args.rounds), "--warmup", str(args.warmup)]
    worker += ["--form", args.form, "--wire", args.wire, "--result", str(result)]
    worker += _AGAINST.get(args.against, ())
    launcher = [sys.executable, "-m", "gradsum", "launch", "--standalone"]
    launcher += ["--nproc-per-node", str(args.workers), "--servers", str(args.servers)]
    return [*launcher, "--", *worker]


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """What the launcher and all its processes inherit."""
    chosen = {_TRANSPORT: args.transport} if args.transport else {}
    return os.environ | {"OMP_NUM_THREADS": "1"} | chosen


def _launch(words: Sequence[str], log: Path, args: argparse.Namespace) -> int:
    """Run to the end, or end it after ``--timeout``; its output goes to ``log``."""
    with (
        log.open("wb") as out,
        subprocess.Popen(
            words, stdout=out, stderr=subprocess.STDOUT, env=_environment(args)
        ) as child,
    ):
        try:
            return child.wait(args.timeout)
        except subprocess.TimeoutExpired:
            out.write(f"not finished after {args.timeout} seconds (--timeout)\n".encode())
            return 1
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(_GRACE)
                except subprocess.TimeoutExpired:
                    child.kill()
