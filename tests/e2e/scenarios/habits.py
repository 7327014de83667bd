"""What people do around a plain training loop, by our optimizer and by DDP over the service.

Each habit trains a few steps both ways; the weights are those of one process that sees all data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import gradsum
from tests.e2e.models import mlp, seeded, square_loss, train, train_alone
from tests.e2e.scenarios.api_semantics import equal_models
from tests.e2e.scenarios.ddp import gloo, wrapped
from tests.e2e.stage import Stage, scenario

STEPS = range(4)


class Habit(NamedTuple):
    """A model and the optimizer that trains it."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]


class Checkpointed(nn.Module):
    """Computes its first layer again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = mlp(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.requires_grad_() if self.reentrant else x
        first = checkpoint(self.body[0], given, use_reentrant=self.reentrant)
        out: torch.Tensor = self.body[1:](first)
        return out


def _reparametrised() -> nn.Module:
    model = mlp()
    parametrizations.weight_norm(model[0])
    return model


def _plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


HABITS = {
    "foreach": Habit(mlp, lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True)),
    "fused": Habit(mlp, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    "parametrisation": Habit(_reparametrised, _plain),
    "checkpointing": Habit(lambda: Checkpointed(reentrant=False), _plain),
    "reentrant checkpointing": Habit(lambda: Checkpointed(reentrant=True), _plain),
}


def _alone(stage: Stage, habit: Habit) -> nn.Module:
    model = seeded(habit.model)
    return train_alone(model, habit.optimizer(model.parameters()), square_loss, stage.size, STEPS)


@scenario()
def habits_by_our_optimizer(stage: Stage) -> None:
    for habit in HABITS.values():
        model = seeded(habit.model)
        optimizer = gradsum.DistributedOptimizer(
            habit.optimizer(model.parameters()), model.named_parameters()
        )
        train(model, optimizer, square_loss, stage.rank, STEPS)
        equal_models(model, _alone(stage, habit))
        stage.same(*model.parameters())


@scenario()
def habits_by_ddp(stage: Stage) -> None:
    with gloo(stage):
        for habit in HABITS.values():
            model = seeded(habit.model)
            optimizer = habit.optimizer(model.parameters())
            train(wrapped(model), optimizer, square_loss, stage.rank, STEPS)
            equal_models(model, _alone(stage, habit))
            stage.same(*model.parameters())
    assert stage.pushes() >= len(HABITS) * len(STEPS), "the service summed nothing"


@scenario()
def an_average_of_the_weights_is_kept_beside_them(stage: Stage) -> None:
    def kept(model: nn.Module, step: Callable[[int], object]) -> AveragedModel:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for number in STEPS:
            step(number)
            average.update_parameters(model)
        return average

    model, alone = seeded(mlp), seeded(mlp)
    optimizer = gradsum.DistributedOptimizer(_plain(model.parameters()), model.named_parameters())
    plain = _plain(alone.parameters())
    ours = kept(model, lambda n: train(model, optimizer, square_loss, stage.rank, [n]))
    theirs = kept(alone, lambda n: train_alone(alone, plain, square_loss, stage.size, [n]))
    equal_models(ours, theirs)
    stage.same(*ours.parameters())
