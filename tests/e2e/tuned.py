"""A training script for test_tuned: steps of some length, then this rank's weights."""

from __future__ import annotations

import hashlib
import sys
import time

import torch

import gradsum


def main(steps: int, pause: float) -> None:
    """Train; ``pause`` seconds of each step stand for a model that computes."""
    gradsum.init()
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 5))
    optimizer = gradsum.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    data = torch.Generator().manual_seed(gradsum.rank() + 1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 300, generator=data)).square().mean().backward()
        time.sleep(pause)
        optimizer.step()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()}", flush=True)
    gradsum.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
