"""One rank of ``gradsum bench push-pull``; the launcher starts it once per worker.

Rules: every round gets fresh numbers, all ranks start it together, filling and checking are outside
the timed part, and a round takes as long as its slowest rank. Contenders take turns, round by
round, in the same processes, on the same tensors.

With ``--result FILE`` rank 0 writes JSON, lists over ranks being in their order::

    {"contenders": {NAME: {"seconds": [every round, warm-up included], "wrong": elements}},
     "links": {SERVER: "shm" or "tcp"},
     "usage": {"minor_faults": {NAME: [of each rank]}, "cpu_seconds": ..., "idle": ...}}

minor_faults and cpu_seconds are a process's own in one round, the median of the rounds after the
warm-up; idle is the idle share of all processors of the machine over these rounds. Without
``--result`` rank 0 prints the report, and the exit code is 1 if an element was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from gradsum.deploy.bench_contenders import FORMS, WIRES, Buckets, Contender, Form, gloo
from gradsum.deploy.bench_payload import Payload, Wrong, shapes
from gradsum.deploy.bench_report import Job, report, table
from gradsum.deploy.bench_usage import Usage
from gradsum.worker import api
from gradsum.worker.default import default

_GLOO_TIMEOUT: Final = timedelta(seconds=120)


class Measured(NamedTuple):
    """One rank's results, a row per contender."""

    seconds: torch.Tensor  # float64 [contenders, rounds]
    usage: torch.Tensor  # float64 [contenders, rounds, len(Usage)]
    wrong: torch.Tensor  # int64 [contenders]


class Total(NamedTuple):
    """The job's results, a row per contender."""

    seconds: torch.Tensor  # float64 [contenders, rounds]: the slowest rank's
    usage: Mapping[str, torch.Tensor]  # float64 [contenders, ranks]
    wrong: torch.Tensor  # int64 [contenders]: of all ranks together


def measure(
    contenders: Mapping[str, Contender],
    tensors: Callable[[], Sequence[torch.Tensor]],
    payload: Payload,
    rounds: int,
) -> Measured:
    """Run all rounds, the contenders taking turns."""
    seconds = torch.zeros(len(contenders), rounds, dtype=torch.float64)
    usage = torch.zeros(len(contenders), rounds, len(Usage._fields), dtype=torch.float64)
    wrong = torch.zeros(len(contenders), dtype=torch.int64)
    for n in range(rounds):
        for row, (name, contender) in enumerate(contenders.items()):
            held = tensors()
            payload.fill(held, n)
            api.barrier()
            before = Usage.now()
            start = time.perf_counter()
            contender.reduce(held)
            seconds[row, n] = time.perf_counter() - start
            usage[row, n] = torch.tensor(Usage.now().since(before), dtype=torch.float64)
            result = payload.check(tensors(), n, contender.divisor)
            if result.elements and not wrong[row]:
                _complain(name, n, result)
            wrong[row] += result.elements
            contender.after()
    return Measured(seconds, usage, wrong)


def _complain(name: str, n: int, wrong: Wrong) -> None:
    print(
        f"{name}, round {n}: {wrong.elements} wrong elements on rank {api.rank()}; the first is "
        f"element {wrong.place} of tensor {wrong.tensor}: {wrong.got}, not {wrong.expected}",
        file=sys.stderr,
        flush=True,
    )


def combine(mine: Measured, warmup: int = 0) -> Total:
    """Over all ranks."""
    seconds = _rows("bench.seconds", mine.seconds).amax(dim=0)
    column = dict(zip(Usage._fields, mine.usage[:, warmup:].unbind(dim=-1), strict=True))
    machine = column["machine_seconds"].sum(dim=1)
    own = {
        "minor_faults": column["minor_faults"].quantile(0.5, dim=1),
        "cpu_seconds": column["cpu_seconds"].quantile(0.5, dim=1),
        "idle": column["idle_seconds"].sum(dim=1) / machine.clamp(min=1e-9),
    }
    usage = {name: _rows(f"bench.{name}", values).T for name, values in own.items()}
    wrong = api.push_pull(mine.wrong, average=False, name="bench.wrong")
    return Total(seconds, usage, wrong)


def _rows(name: str, mine: torch.Tensor) -> torch.Tensor:
    """Every rank's tensor, stacked."""
    rows = torch.zeros(api.size(), *mine.shape, dtype=mine.dtype)
    rows[api.rank()] = mine
    return api.push_pull(rows, average=False, name=name)


def links() -> dict[str, str]:
    """Server -> how this rank reaches it."""
    found = default.get().session.transports()
    return {str(server): how for server, how in found.items()}


def results(names: Sequence[str], total: Total) -> dict[str, Any]:
    """What ``--result`` writes."""
    return {
        "contenders": {
            name: {"seconds": total.seconds[row].tolist(), "wrong": int(total.wrong[row])}
            for row, name in enumerate(names)
        },
        "links": links(),
        "usage": {
            what: dict(zip(names, values.tolist(), strict=True))
            for what, values in total.usage.items()
        },
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gradsum.deploy.bench_worker")
    add = parser.add_argument
    add("--bytes", type=int, required=True, help="float32 of each rank, in bytes")
    add("--tensors", type=int, required=True, help="equal tensors that make up the bytes")
    add("--rounds", type=int, required=True, help="warm-up rounds included")
    add("--warmup", type=int, default=0, help="rounds checked but not counted")
    add("--form", choices=list(FORMS), default="tensors", help="what holds the bytes")
    add("--wire", choices=list(WIRES), default="fp32", help="what gradsum sends")
    add("--gloo", action="store_true", help="take turns with all-reduce of torch.distributed")
    add("--ddp", action="store_true", help="take turns with 25 MiB buckets over Gloo, as DDP does")
    add("--result", type=Path, metavar="FILE", help="write the measurements, print no report")
    add("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(argv)
    if not 0 <= args.warmup < args.rounds:
        parser.error("--warmup leaves no round to count")
    if args.tensors < 1 or args.bytes < 4 * args.tensors:
        parser.error("--bytes is less than one element a tensor")
    return args


def _contenders(args: argparse.Namespace, form: Form, counts: list[int]) -> dict[str, Contender]:
    found = {"gradsum": form.contender}
    if args.gloo:
        found["gloo"] = Contender(gloo)
    if args.ddp:
        found["ddp"] = Contender(Buckets(counts).reduce)
    return found


def _publish(args: argparse.Namespace, measured: dict[str, Any]) -> None:
    if args.result:
        args.result.write_text(json.dumps(measured), encoding="utf-8")
        return
    rounds, asked = args.rounds - args.warmup, default.get().session.settings.transport
    job = Job(
        api.size(), 0, args.bytes, args.tensors, args.form, args.wire, asked, args.warmup, rounds
    )
    found = report(job, measured)
    print(json.dumps(found) if args.json else table(found), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    api.init()
    if args.gloo or args.ddp:
        dist.init_process_group("gloo", timeout=_GLOO_TIMEOUT)
    counts = shapes(args.bytes, args.tensors)
    payload = Payload(counts, api.rank(), api.size(), args.wire)
    form = FORMS[args.form](counts, WIRES[args.wire])
    contenders = _contenders(args, form, counts)
    total = combine(measure(contenders, form.tensors, payload, args.rounds), args.warmup)
    if api.rank() == 0:
        _publish(args, results(list(contenders), total))
    if dist.is_initialized():
        dist.destroy_process_group()
    api.shutdown()
    return 1 if not args.result and total.wrong.any() else 0


if __name__ == "__main__":
    sys.exit(main())
