"""One rank of ``gradsum bench push-pull``; the launcher starts it once per worker.

Rules: every round gets fresh numbers, all ranks start it together, filling and checking are outside
the timed part, and a round takes as long as its slowest rank. With ``--against gloo`` the rounds of
the two alternate in the same processes, on the same tensors. Rank 0 writes the times to a file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from gradsum.deploy.bench_payload import Payload, Wrong
from gradsum.worker import api

Reduce: TypeAlias = Callable[[Sequence[torch.Tensor]], None]
_GLOO_TIMEOUT: Final = timedelta(seconds=120)


class Measured(NamedTuple):
    """One rank's results, a row per contender."""

    seconds: torch.Tensor  # float64 [contenders, rounds]
    wrong: torch.Tensor  # int64 [contenders]


def reduce_by_gradsum(tensors: Sequence[torch.Tensor]) -> None:
    """The sums over all ranks, in place."""
    handles = [
        api.push_pull_async_inplace(tensor, average=False, name=f"bench.{i}")
        for i, tensor in enumerate(tensors)
    ]
    for handle in handles:
        api.synchronize(handle)


def reduce_by_gloo(tensors: Sequence[torch.Tensor]) -> None:
    """The same by torch.distributed."""
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        if work is not None:
            work.wait()


def measure(contenders: dict[str, Reduce], payload: Payload, rounds: int) -> Measured:
    """Run all rounds, the contenders taking turns."""
    seconds = torch.zeros(len(contenders), rounds, dtype=torch.float64)
    wrong = torch.zeros(len(contenders), dtype=torch.int64)
    for n in range(rounds):
        for row, (name, reduce) in enumerate(contenders.items()):
            payload.fill(n)
            api.barrier()
            start = time.perf_counter()
            reduce(payload.tensors)
            seconds[row, n] = time.perf_counter() - start
            result = payload.check(n)
            if result.elements and not wrong[row]:
                _complain(name, n, result)
            wrong[row] += result.elements
    return Measured(seconds, wrong)


def _complain(name: str, n: int, wrong: Wrong) -> None:
    print(
        f"{name}, round {n}: {wrong.elements} wrong elements on rank {api.rank()}; the first is "
        f"element {wrong.place} of tensor {wrong.tensor}: {wrong.got}, not {wrong.expected}",
        file=sys.stderr,
        flush=True,
    )


def combine(mine: Measured) -> Measured:
    """Over all ranks: the slowest time of each round and the number of wrong elements."""
    rows = torch.zeros(api.size(), *mine.seconds.shape, dtype=torch.float64)
    rows[api.rank()] = mine.seconds
    rows = api.push_pull(rows, average=False, name="bench.seconds")
    wrong = api.push_pull(mine.wrong, average=False, name="bench.wrong")
    return Measured(rows.amax(dim=0), wrong)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gradsum.deploy.bench_worker")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True, help="warm-up rounds included")
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    api.init()
    contenders: dict[str, Reduce] = {"gradsum": reduce_by_gradsum}
    if args.gloo:
        dist.init_process_group("gloo", timeout=_GLOO_TIMEOUT)
        contenders["gloo"] = reduce_by_gloo
    payload = Payload(args.bytes, args.tensors, api.rank(), api.size())
    total = combine(measure(contenders, payload, args.rounds))
    if api.rank() == 0:
        results = {
            name: {"seconds": total.seconds[row].tolist(), "wrong": int(total.wrong[row])}
            for row, name in enumerate(contenders)
        }
        args.result.write_text(json.dumps(results), encoding="utf-8")
    if args.gloo:
        dist.destroy_process_group()
    api.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
