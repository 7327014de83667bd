"""Small models, data of each rank, and the single process that sees all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

import gradsum

M = TypeVar("M", bound=nn.Module)
Loss = Callable[[nn.Module, int, int], torch.Tensor]
"""(model, rank, step) -> loss of that rank's batch."""


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def push(parameter: torch.Tensor, grad: float) -> None:
    """A backward pass that adds ``grad`` to every element's gradient."""
    (parameter * grad).sum().backward()


def wrapped(optimizer: torch.optim.Optimizer, *named: tuple[str, torch.Tensor], **how: Any) -> Any:
    """A distributed optimizer; without names by place."""
    return gradsum.DistributedOptimizer(optimizer, named_parameters=named or None, **how)


def sgd(*parameters: nn.Parameter, lr: float = 0.1, **how: Any) -> Any:
    """A distributed SGD over parameters named p0, p1, ..."""
    inner = {k: how.pop(k) for k in ("momentum", "weight_decay") if k in how}
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    return wrapped(torch.optim.SGD(list(parameters), lr=lr, **inner), *named, **how)


def seeded(make: Callable[[], M], seed: int = 0) -> M:
    """A model whose weights depend on the seed only."""
    torch.manual_seed(seed)
    return make()


def mlp(width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    """This rank's data of a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(*(shape or (3, 4)), generator=generator)


def square_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(rank, step)).square().mean()
    return loss


def mean_gradients(
    parameters: Iterable[nn.Parameter],
    ranks: int,
    loss: Callable[..., torch.Tensor],
    *arguments: Any,
    **more: Any,
) -> None:
    """What the service makes: each rank's gradients alone, added in rank order, divided once.

    ``loss(*arguments, rank=rank, **more)`` is that rank's loss.
    """
    held = list(parameters)
    sums: list[torch.Tensor | None] = [None] * len(held)
    for rank in range(ranks):
        for p in held:
            p.grad = None
        loss(*arguments, rank=rank, **more).backward()
        for i, p in enumerate(held):
            before = sums[i]
            if p.grad is not None:
                sums[i] = p.grad if before is None else before + p.grad
    for p, total in zip(held, sums, strict=True):
        p.grad = None if total is None else total / ranks


def train_alone(
    model: M, optimizer: torch.optim.Optimizer, loss: Loss, ranks: int, steps: Iterable[int]
) -> M:
    """The single process: the mean over all ranks' batches, step by step."""
    for step in steps:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        mean_gradients(parameters, ranks, loss, model, step=step)
        optimizer.step()
    return model


def train(model: M, optimizer: Any, loss: Loss, rank: int, steps: Iterable[int]) -> M:
    """One rank's training."""
    for step in steps:
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    return model


def weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, p in model.named_parameters():
        yield name, p.detach()
