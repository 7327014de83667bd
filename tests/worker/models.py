"""Small models, each rank's data, and the single process that sees all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from gradsum.worker.client import Client
from gradsum.worker.optimizer import Distributed, wrap

M = TypeVar("M", bound=nn.Module)
both = pytest.mark.parametrize("late", [False, True], ids=["soon", "late"])


def one(value: float = 0.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def backward(parameter: torch.Tensor, grad: float) -> None:
    (parameter * grad).sum().backward()


def sgd(
    client: Client, *named: tuple[str, torch.Tensor], lr: float = 0.1, **how: Any
) -> Distributed:
    options = {k: how.pop(k) for k in ("momentum", "weight_decay") if k in how}
    inner = torch.optim.SGD([p for _, p in named], lr=lr, **options)
    return wrap(client, inner, list(named), **how)


_SEEDING = threading.Lock()  # ranks are threads and torch's seed belongs to the process


def seeded(make: Callable[[], M]) -> M:
    with _SEEDING:
        torch.manual_seed(0)
        return make()


def net() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))


def train_with(client: Client, model: nn.Module, lr: float = 0.1, **how: Any) -> Distributed:
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    return wrap(client, inner, model.named_parameters(), **how)


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * rank + step))


def single(
    ranks: int,
    steps: int,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor],
) -> nn.Module:
    """One process that sees all ranks' batches: mean of their gradients."""
    model = net()
    optimizer = make(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss(model, data(rank, step)) / ranks).backward()
        optimizer.step()
    return model


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def assert_close(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
