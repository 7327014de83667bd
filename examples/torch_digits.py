"""The digits of digits.py, trained by what torch itself brings, over gradsum.

    gradsum launch --standalone --nproc-per-node 2 -- python examples/torch_digits.py --style hook
    GRADSUM_COORDINATOR=10.0.0.1:7700 torchrun --nproc-per-node 2 examples/torch_digits.py

`hook`: stock DistributedDataParallel over Gloo, and one line more, `gradsum.torch.attach(model)`.
`backend`: stock DistributedDataParallel on the torch.distributed backend "gradsum".
`fsdp2`: `fully_shard` on that backend. Rank 0 prints how far the weights are from those that one
process alone would have got.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist
from digits import Data, accuracy_of, batches, build_model, build_optimizer, loss_of, train_alone
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradsum.torch


def prepare(style: str, model: nn.Module) -> nn.Module:
    """The model as torch trains it on several processes."""
    if style == "hook":
        return gradsum.torch.attach(DistributedDataParallel(model))
    if style == "backend":
        return DistributedDataParallel(model)
    fully_shard(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--style", choices=("hook", "backend", "fsdp2"), default="hook")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if args.style == "hook" else "gradsum")
    rank, size = dist.get_rank(), dist.get_world_size()
    data, plain = Data(), build_model(args.seed)
    model = prepare(args.style, plain)
    optimizer = build_optimizer(model)
    for shards in batches(args.epochs, args.seed, size):
        optimizer.zero_grad()
        loss_of(model, data, shards[rank]).backward()
        optimizer.step()
    trained = {
        name: weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()
        for name, weight in plain.named_parameters()
    }
    if rank == 0:
        alone = train_alone(args, data, size)
        differences = [
            (trained[name] - weight).abs().max() for name, weight in alone.named_parameters()
        ]
        alone.load_state_dict(trained)
        found = {"accuracy": accuracy_of(alone, data), "difference": max(differences).item()}
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
