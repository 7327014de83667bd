"""One rank that trains a model whose layers only take time: what scheduling is worth.

Computation is a sleep by the layer profile of a real model, since real computation would fill the
two cores; a sleep that was too long shortens the next one, as an accelerator would not be late. The
bytes, hooks, optimizer steps and transfers are real. Gradients are whole numbers of rank, step and
place, and the weights at the end are compared with what they must be, element by element: one wrong
sum in any step is found. Rank 0 writes JSON, as deploy/bench_worker.py does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.rank import arguments, publish
from gradsum.scheduler.profiles import Layer, Profile, profile
from gradsum.worker import api
from gradsum.worker.default import default

BULK = 3
LIMIT = timedelta(seconds=120)


class Pace:
    """What all layers of this rank share: which step it is, and hence each gradient's factor."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.step = 0
        self._late = 0.0

    def until(self, end: float) -> None:
        """Sleep to a moment, less what earlier sleeps have been too long."""
        end -= self._late
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)
        self._late = time.perf_counter() - end

    def factor(self) -> float:
        """Of this rank's gradients in this step."""
        return float(self.rank + 1 + self.step % 3)

    def total(self, steps: int) -> float:
        """The sum over the steps of the mean over the ranks."""
        return sum((self.size + 1) / 2 + step % 3 for step in range(steps))


class _Busy(torch.autograd.Function):
    """Takes its time, and gives each parameter the gradient of this step."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Timed, *_parameters: torch.Tensor) -> Any:
        ctx.layer = layer
        layer.pace.until(time.perf_counter() + layer.shape.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        layer: Timed = ctx.layer
        end = time.perf_counter() + layer.shape.backward
        mine = [place * layer.pace.factor() for place in layer.places]
        layer.pace.until(end)
        return (grads[0], None, *mine)


class Timed(nn.Module):
    """One layer of the profile: parameters of its sizes, all zero at first."""

    def __init__(self, shape: Layer, pace: Pace) -> None:
        super().__init__()
        for number, count in enumerate(shape.tensors):
            self.register_parameter(f"w{number}", nn.Parameter(torch.zeros(count)))
        self.shape = shape
        self.pace = pace
        self.places = [torch.arange(count, dtype=torch.float32) % 7 for count in shape.tensors]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Busy.apply(x, self, *self.parameters())  # type: ignore[no-untyped-call]
        return out

    def wrong(self, total: float) -> int:
        """Elements that are not what this many steps must have made of them."""
        return sum(
            int((weight != -total * place).sum())
            for weight, place in zip(self.parameters(), self.places, strict=True)
        )


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bytes", type=int, required=True, help="of the model, shrunk to")
    parser.add_argument("--compute", type=float, required=True, help="seconds of a step")
    parser.add_argument("--contender", choices=("gradsum", "ddp"), required=True)
    parser.add_argument("--barrier", action="store_true", help="step() waits for all sums")
    parser.add_argument("--later", type=Path, metavar="FILE", help="write it after these steps, "
                        "and train as many again")  # fmt: skip
    return parser.parse_args()


def train(
    model: nn.Module, optimizer: Any, pace: Pace, steps: int, meet: Callable[[], None]
) -> list[float]:
    """Seconds of each step, from one's beginning to the next one's."""
    x = torch.zeros(1, requires_grad=True)
    meet()
    begun = []
    for _ in range(steps):
        begun.append(time.perf_counter())
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        pace.step += 1
    begun.append(time.perf_counter())
    return [after - before for before, after in zip(begun, begun[1:], strict=False)]


Trained = tuple[list[float], int, dict[str, Any]]
"""Seconds of each step, wrong elements on all ranks, and what else is known."""


def with_gradsum(args: argparse.Namespace, shape: Profile) -> Trained:
    """Our own; also a bulk transfer of the same bytes, before the timed steps."""
    api.init()
    pace = Pace(api.rank(), api.size())
    model = nn.Sequential(*(Timed(layer, pace) for layer in shape.layers))
    optimizer = api.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model=model, cross_barrier=not args.barrier
    )
    seconds = train(model, optimizer, pace, args.warmup, api.barrier)
    optimizer.flush()
    bulk = []
    whole = torch.zeros(shape.nbytes // 4)
    for _ in range(BULK):
        api.barrier()
        start = time.perf_counter()
        api.push_pull_inplace(whole, name="bulk")
        bulk.append(time.perf_counter() - start)
    seconds += train(model, optimizer, pace, args.steps, api.barrier)
    if args.later is not None:
        args.later.touch()
        seconds += train(model, optimizer, pace, args.steps, api.barrier)
    optimizer.flush()
    found = {"bulk": sorted(bulk)[BULK // 2], "links": default.get().session.transports()}
    wrong = _wrong(model, pace)
    total = sum(api.push_pull(torch.tensor([float(wrong)]), average=False, name="wrong").tolist())
    api.barrier()
    api.shutdown()
    return seconds, int(total), found


def with_ddp(args: argparse.Namespace, shape: Profile) -> Trained:
    """Stock DistributedDataParallel over Gloo."""
    dist.init_process_group("gloo", timeout=LIMIT)
    pace = Pace(dist.get_rank(), dist.get_world_size())
    model = nn.Sequential(*(Timed(layer, pace) for layer in shape.layers))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seconds = train(wrapped, optimizer, pace, args.warmup + args.steps, dist.barrier)
    wrong = torch.tensor([_wrong(model, pace)])
    dist.all_reduce(wrong)
    dist.destroy_process_group()
    return seconds, int(wrong), {"links": {}}


def _wrong(model: nn.Sequential, pace: Pace) -> int:
    total = pace.total(pace.step)
    return sum(layer.wrong(total) for layer in model if isinstance(layer, Timed))


def main() -> None:
    """Train, check, report."""
    args = parse()
    torch.set_num_threads(1)
    shape = profile(args.model).shrunk(args.bytes).paced(args.compute)
    run = with_ddp if args.contender == "ddp" else with_gradsum
    seconds, wrong, found = run(args, shape)
    contenders = {args.contender: {"seconds": seconds, "wrong": wrong}}
    publish(args.result, {"contenders": contenders} | found)


if __name__ == "__main__":
    main()
