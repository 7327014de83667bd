"""Handwritten digits: a small CNN, trained by as many processes as you like.

    python examples/digits.py                                                        # one process
    gradsum launch --standalone --nproc-per-node 2 -- python examples/digits.py --compare

Every worker computes the gradients of its own part of each batch; the servers add them up; every
worker divides by the number of workers and takes the same optimizer step. So all workers hold the
same weights all the time, and `--compare` shows that they are the weights which one process alone
would have got: bit for bit with two workers.

The data (1,797 images of 8x8 pixels) comes with scikit-learn. Look for "gradsum" to see all that
distributed training adds to a plain torch program.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import gradsum

BATCH = 16  # images per worker and step
TRAIN_IMAGES = 1500  # the other 297 measure the accuracy
GOAL = 0.95


class Data:
    """The digits as tensors, shuffled once in the same way on every worker."""

    def __init__(self) -> None:
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16
        labels = torch.tensor(digits.target)[order]
        self.images, self.labels = images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES]
        self.test_images, self.test_labels = images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:]


def steps_per_epoch(size: int) -> int:
    return TRAIN_IMAGES // (BATCH * size)


def batches(epochs: int, seed: int, size: int) -> Iterator[list[Tensor]]:
    """For every step, the image numbers of each worker: one list entry per rank."""
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(TRAIN_IMAGES, generator=shuffle)
        for step in range(steps_per_epoch(size)):
            first = step * size * BATCH
            yield list(order[first : first + size * BATCH].split(BATCH))


def build_model(seed: int) -> nn.Module:
    """Smooth throughout (no ReLU, no max): rounding differences stay as small as they begin."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.Tanh(),
        nn.Linear(64, 10),
    )


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, data: Data, index: Tensor) -> Tensor:
    return F.cross_entropy(model(data.images[index]), data.labels[index])


@torch.no_grad()
def accuracy_of(model: nn.Module, data: Data) -> float:
    hits = model(data.test_images).argmax(dim=1) == data.test_labels
    return hits.float().mean().item()


def train(args: argparse.Namespace, data: Data) -> nn.Module:
    """What every worker runs. Returns its model, which is the same on all of them."""
    rank, size = gradsum.rank(), gradsum.size()
    model = build_model(args.seed + rank)  # differs between ranks until rank 0 hands out its own
    gradsum.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = gradsum.DistributedOptimizer(
        build_optimizer(model), named_parameters=model.named_parameters()
    )
    steps = args.epochs * steps_per_epoch(size)
    with tqdm(total=steps, desc="training", disable=rank != 0) as bar:
        for shards in batches(args.epochs, args.seed, size):
            optimizer.zero_grad()
            loss = loss_of(model, data, shards[rank])
            loss.backward()  # gradients start to travel while this is still running
            optimizer.step()  # waits for the averages
            bar.update()
    gradsum.assert_in_sync(model)  # raises on every rank if a single bit differs between ranks
    return model


def train_alone(args: argparse.Namespace, data: Data, size: int) -> nn.Module:
    """The same training in one process, without gradsum: the reference of `--compare`.

    Computes the gradients of each worker in turn, with the same batches, adds them in rank order in
    float32 and divides by the number of workers once, which is what the service does.
    """
    model = build_model(args.seed)
    optimizer = build_optimizer(model)
    parameters = list(model.parameters())
    for shards in batches(args.epochs, args.seed, size):
        totals: list[Tensor] = []
        for shard in shards:
            gradients = torch.autograd.grad(loss_of(model, data, shard), parameters)
            if not totals:
                totals = [gradient.clone() for gradient in gradients]
            else:
                for total, gradient in zip(totals, gradients, strict=True):
                    total += gradient
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total / size
        optimizer.step()
    return model


def compare(model: nn.Module, reference: nn.Module, exact: bool) -> tuple[bool, str]:
    """Whether the weights agree: bit for bit if `exact`, else within 1e-5."""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    its = nn.utils.parameters_to_vector(reference.parameters()).detach()
    if torch.equal(mine.view(torch.int32), its.view(torch.int32)):
        return True, "equal to the single-process reference, bit for bit"
    largest = (mine - its).abs().max().item()
    agree = not exact and largest <= 1e-5
    word = "within 1e-5 of" if agree else "DIFFERENT from"
    return agree, f"{word} the single-process reference (largest difference {largest:.1e})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small CNN on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compare", action="store_true", help="check against a single process")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    return parser.parse_args()


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    data = Data()
    gradsum.init()
    rank, size = gradsum.rank(), gradsum.size()
    start = time.perf_counter()
    model = train(args, data)
    seconds = time.perf_counter() - start
    gradsum.shutdown()
    if rank != 0:
        return 0

    steps = args.epochs * steps_per_epoch(size)
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    pushed = model_bytes * steps if size > 1 else 0
    accuracy = accuracy_of(model, data)
    agree, verdict = True, "not compared (--compare)"
    if args.compare:
        # a + b equals b + a, but a float sum of three or more depends on who arrives first, unless
        # the service adds in rank order.
        in_order = os.environ.get("GRADSUM_DETERMINISTIC", "").lower() in ("1", "true", "yes", "on")
        agree, verdict = compare(model, train_alone(args, data, size), size <= 2 or in_order)

    if args.json:
        result = {"workers": size, "accuracy": accuracy, "seconds": seconds, "steps": steps}
        result |= {"bytes_pushed": pushed, "agree": agree, "weights": verdict}
        print(json.dumps(result), flush=True)
    else:
        print(f"workers           {size}")
        print(f"training          {steps} steps in {seconds:.1f} s")
        print(f"gradients pushed  {pushed / 1e6:.1f} MB by each worker")
        print(f"test accuracy     {accuracy:.1%}")
        print(f"weights           {verdict}", flush=True)
    if accuracy <= GOAL:
        print(f"test accuracy is not above {GOAL:.0%}", file=sys.stderr)
    return 0 if agree and accuracy > GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
