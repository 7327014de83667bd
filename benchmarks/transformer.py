"""One rank that trains the character transformer of examples/: a real model, its real computation.

First with the usual barrier in ``step()``, then across it; the model, the batches and the order of
sums are the same, so every loss must be the same to the last bit: one that differs counts as wrong.
During the first run each layer's computation is timed, by rank 0, for the simulator.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rank import arguments, publish
from examples.char_transformer import CharTransformer, draw_batch, read_text
from gradsum.worker import api
from gradsum.worker.default import default

CONTEXT = 64
BATCH = 6


class Stopwatch:
    """When each module with parameters of its own began forward, and had its gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [
            (name, module, list(module.parameters(recurse=False)))
            for name, module in model.named_modules()
            if list(module.parameters(recurse=False))
        ]
        self._begun: dict[str, float] = {}
        self._ready: dict[str, float] = {}
        self._forward: dict[str, list[float]] = {}
        self._backward: dict[str, list[float]] = {}
        self._hooks: list[Any] = []
        for name, module, parameters in self.layers:
            self._hooks.append(module.register_forward_pre_hook(self._begin(name)))
            for parameter in parameters:
                hook = parameter.register_post_accumulate_grad_hook(self._end(name))
                self._hooks.append(hook)

    def _begin(self, name: str) -> Any:
        return lambda *_: self._begun.setdefault(name, time.perf_counter()) and None

    def _end(self, name: str) -> Any:
        return lambda *_: self._ready.__setitem__(name, time.perf_counter())

    def step(self, turned: float) -> None:
        """After a backward pass that began at ``turned``: what each layer took, until the next."""
        order = sorted(self._begun, key=lambda name: self._begun[name])
        ends = [*(self._begun[name] for name in order[1:]), turned]
        for name, end in zip(order, ends, strict=True):
            self._forward.setdefault(name, []).append(end - self._begun[name])
        before = turned
        for name in sorted(self._ready, key=lambda name: self._ready[name]):
            self._backward.setdefault(name, []).append(self._ready[name] - before)
            before = self._ready[name]
        self._begun.clear()
        self._ready.clear()

    def profile(self) -> list[dict[str, Any]]:
        """Layers in forward order, as ``gradsum plan --profile`` takes them."""
        sizes = {name: [p.numel() for p in parameters] for name, _, parameters in self.layers}
        return [
            {"name": name, "tensors": sizes[name], "forward": median(spans),
             "backward": median(self._backward[name])}
            for name, spans in self._forward.items()
        ]  # fmt: skip

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class Run:
    """Training from the same beginning, with or without a barrier."""

    def __init__(self, args: argparse.Namespace, text: Tensor, *, barrier: bool) -> None:
        torch.manual_seed(7)
        self._text = text
        self._random = torch.Generator().manual_seed(100 + api.rank())
        self.model = CharTransformer(CONTEXT, width=args.width, layers=args.layers)
        self.optimizer = api.DistributedOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=1e-3), model=self.model,
            cross_barrier=not barrier,
        )  # fmt: skip
        self.watch = Stopwatch(self.model) if barrier else None
        self.losses: list[float] = []

    def train(self, steps: int) -> list[float]:
        """Seconds of each step."""
        api.barrier()
        begun = []
        for _ in range(steps):
            begun.append(time.perf_counter())
            batch = draw_batch(self._text, BATCH, CONTEXT, self._random)
            self.optimizer.zero_grad()
            letters = self.model(batch[:, :-1])
            loss = F.cross_entropy(letters.flatten(0, 1), batch[:, 1:].flatten())
            turned = time.perf_counter()
            loss.backward()
            if self.watch is not None:
                self.watch.step(turned)
            self.optimizer.step()
            self.losses.append(float(loss))
        begun.append(time.perf_counter())
        self.optimizer.flush()
        return [after - before for before, after in zip(begun, begun[1:], strict=False)]


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = arguments(__doc__)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    """Train twice, compare, report."""
    args = parse()
    torch.set_num_threads(1)
    api.init()
    text = read_text()
    contenders: dict[str, Any] = {}
    runs = {name: Run(args, text, barrier=name == "barrier") for name in ("barrier", "gradsum")}
    for name, run in runs.items():
        contenders[name] = {"seconds": run.train(args.warmup + args.steps), "wrong": 0}
        if run.watch is not None:
            run.watch.close()
    pairs = zip(runs["barrier"].losses, runs["gradsum"].losses, strict=True)
    wrong = torch.tensor([float(sum(a != b for a, b in pairs))])
    contenders["gradsum"]["wrong"] = int(api.push_pull(wrong, average=False, name="wrong").item())
    watch = runs["barrier"].watch
    assert watch is not None
    publish(args.result, {
        "contenders": contenders, "links": default.get().session.transports(),
        "profile": watch.profile(),
        "losses": [runs["barrier"].losses[0], runs["barrier"].losses[-1]],
    })  # fmt: skip
    api.barrier()
    api.shutdown()


if __name__ == "__main__":
    main()
