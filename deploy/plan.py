"""``gradsum plan``: how many CPU machines a job should add, and what they will gain.

Rules: what gradsum takes is simulated with its own queue, credit and slices (scheduler/simulator);
what it is compared with is the fluid model (scheduler/fluid.py), which nothing can beat: so the
answer errs against gradsum. What was assumed is said. Links carry GOODPUT of their rate, TCP's
payload in frames of 1,500 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from gradsum.deploy.status import columns
from gradsum.errors import ConfigError, UsageError
from gradsum.scheduler.fluid import all_reduce, fifo, optimum, service_cost
from gradsum.scheduler.profiles import MODELS, Profile, parse, profile
from gradsum.scheduler.simulator.cluster import Cluster
from gradsum.scheduler.simulator.run import simulate

GOODPUT: Final = 1448 / 1514
NEAR: Final = 1.02
"""The knee: the fewest servers whose step takes at most this times the best one's."""

MOST: Final = 10_000
FEW: Final = 4
"""Rows up to which other processes would take longer to start than to help."""

DEFAULT_ROWS: Final = 65
"""Without --servers: each row takes a part of a second, ten thousand would take an hour."""

LATENCY_US: Final = 100.0
FRAME_US: Final = 150.0
"""From machine to machine, as in a data centre; and the work for one slice in the thread that sends
and receives (docs/performance.md, "Training")."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``gradsum plan``."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", choices=MODELS, help="a model whose profile is built in")
    what.add_argument("--profile", type=Path, metavar="FILE", help="a profile of yours, JSON")
    parser.add_argument("--workers", type=_number, required=True, metavar="N", help="machines")
    parser.add_argument("--gbps", type=_positive, required=True, metavar="G", help="of each link")
    parser.add_argument("--servers", type=_range, metavar="K", help="such as 4, 0..64, 0,8,16 "
                        f"(default 0..N, at most {DEFAULT_ROWS} of them)")  # fmt: skip
    parser.add_argument("--step-ms", type=_positive, metavar="MS", help="computation of one step "
                        "(default: as long as a server for each worker communicates)")  # fmt: skip
    parser.add_argument("--latency-us", type=_positive, default=LATENCY_US, metavar="US",
                        help="from one machine to another (default %(default)g)")  # fmt: skip
    parser.add_argument("--frame-us", type=_positive, default=FRAME_US, metavar="US", help="work "
                        "of worker or server for each slice (default %(default)g)")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="for programs")


@dataclass(frozen=True, slots=True)
class Row:
    """One number of servers. Seconds of a step, simulated, at best, and at best without scheduling;
    gain over all-reduce; link: busy share."""

    servers: int
    seconds: float
    best_seconds: float
    fifo_seconds: float
    gain: float
    link: float


@dataclass(frozen=True, slots=True)
class Answer:
    """All rows, and what they were computed from. Bytes, seconds, bytes per second."""

    model: str
    nbytes: int
    workers: int
    rate: float
    latency: float
    frame: float
    compute: float
    assumed: bool
    all_reduce: float
    knee: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. Seconds, bytes/s; shape: with the computation of a step; all_reduce: of a step
    over a perfect ring."""

    shape: Profile
    workers: int
    rate: float
    latency: float
    frame: float
    all_reduce: float

    def row(self, servers: int) -> Row:
        """One line of the answer."""
        shape, workers, rate = self.shape, self.workers, self.rate
        cluster = Cluster.equal(workers, servers, rate, latency=self.latency, frame=self.frame)
        seconds = simulate(shape, cluster).seconds
        return Row(
            servers, seconds, optimum(shape, workers, servers, rate),
            fifo(shape, workers, servers, rate), self.all_reduce / seconds,
            shape.nbytes * service_cost(workers, servers, rate) / seconds,
        )  # fmt: skip


def answer(
    shape: Profile, workers: int, gbps: float, servers: tuple[int, ...], step: float | None,
    latency: float = LATENCY_US / 1e6, frame: float = FRAME_US / 1e6,
) -> Answer:  # fmt: skip
    """Compute the table; step: seconds of computation, None: as long as communication takes."""
    rate = gbps * 1e9 / 8 * GOODPUT
    compute = step
    if compute is None:
        compute = shape.nbytes * service_cost(workers, workers, rate)
    paced = shape.paced(compute)
    ring = all_reduce(paced, workers, 0, rate)
    question = Question(paced, workers, rate, latency, frame, ring)
    rows = list(_progress(_rows(question, servers), len(servers)))
    best = min(row.seconds for row in rows)
    knee = min(row.servers for row in rows if row.seconds <= NEAR * best)
    return Answer(
        shape.name, shape.nbytes, workers, rate, latency, frame, compute, step is None,
        ring, knee, tuple(rows),
    )  # fmt: skip


def spread(workers: int) -> tuple[int, ...]:
    """Numbers of servers from none to one for each worker, evenly, not too many."""
    rows = min(workers, DEFAULT_ROWS - 1)
    return tuple(round(workers * row / rows) for row in range(rows + 1))


def _rows(question: Question, servers: tuple[int, ...]) -> Iterator[Row]:
    if len(servers) <= FEW:
        yield from map(question.row, servers)
        return
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(servers))) as pool:
        yield from pool.map(question.row, servers)


def _progress(rows: Iterable[Row], count: int) -> Iterator[Row]:
    """The same, counted on a terminal."""
    shown = sys.stderr.isatty()
    for number, row in enumerate(rows, 1):
        if shown:
            print(f"\rsimulated {number} of {count}", end="", file=sys.stderr, flush=True)
        yield row
    if shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    """Print the answer; 0. Raises ConfigError for a profile or a file that cannot be used."""
    shape = profile(args.model) if args.model else _read(args.profile)
    servers = args.servers or spread(args.workers)
    step = None if args.step_ms is None else args.step_ms / 1e3
    found = answer(shape, args.workers, args.gbps, servers, step, args.latency_us / 1e6,
                   args.frame_us / 1e6)  # fmt: skip
    if args.plot:
        _plot(found, args.plot)
    print(json.dumps(asdict(found), indent=2) if args.json else "\n".join(describe(found)))
    return 0


def describe(found: Answer) -> Iterator[str]:
    """The lines that people read."""
    yield (
        f"{found.model}: {found.nbytes / 1e6:.1f} MB of gradients, {found.workers} workers, links "
        f"that carry {found.rate / 1e6:.0f} MB/s"
    )
    how = "assumed: as long as communication; see --step-ms" if found.assumed else "given"
    yield f"computation {found.compute * 1e3:.1f} ms a step ({how})"
    yield f"all-reduce over a perfect ring: {found.all_reduce * 1e3:.1f} ms a step"
    yield ""
    head = ("CPU servers", "step ms", "by all-reduce", "at best ms", "without scheduling ms",
            "link busy", "")  # fmt: skip
    yield from columns(head, [
        (str(r.servers), f"{r.seconds * 1e3:.1f}", f"{r.gain:.2f}x", f"{r.best_seconds * 1e3:.1f}",
         f"{r.fifo_seconds * 1e3:.1f}", f"{r.link:.0%}",
         "<- enough" if r.servers == found.knee else "")
        for r in found.rows
    ])  # fmt: skip
    yield ""
    yield (
        f"step: simulated, {found.latency * 1e6:g} us between machines, {found.frame * 1e6:g} us "
        "of work a slice; all others at best, without overhead"
    )
    yield "more than one server for each worker gains nothing"


def _read(path: Path) -> Profile:
    try:
        return parse(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", hint="see --profile") from None


def _plot(found: Answer, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib, which is not installed", hint="pip install 'gradsum[plot]'"
        ) from None
    figure: Any = Figure()
    axes = figure.subplots()
    servers = [row.servers for row in found.rows]
    axes.plot(servers, [row.seconds * 1e3 for row in found.rows], marker=".", label="gradsum")
    axes.plot(servers, [row.best_seconds * 1e3 for row in found.rows], label="at best")
    axes.plot(servers, [row.fifo_seconds * 1e3 for row in found.rows], label="without scheduling")
    axes.axhline(found.all_reduce * 1e3, linestyle="--", color="gray", label="all-reduce")
    axes.set(xlabel="CPU servers", ylabel="ms a step", ylim=(0, None), title=found.model)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}", hint="such as plan.png") from None


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _range(text: str) -> tuple[int, ...]:
    """``4``, ``0..64`` or ``0,8,16``."""
    found: set[int] = set()
    for part in text.split(","):
        low, dots, high = part.partition("..")
        ends = (low, high if dots else low)
        if not all(end.isascii() and end.isdigit() and int(end) <= MOST for end in ends):
            raise argparse.ArgumentTypeError(f"{text!r} is not such as 4, 0..64 or 0,8,16")
        found.update(range(int(ends[0]), int(ends[1]) + 1))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} holds no number")
    return tuple(sorted(found))
