"""A real model on real data, against the single process that sees all ranks' batches."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import gradsum
from tests.e2e.models import seeded, train, train_alone, weights, wrapped
from tests.e2e.stage import Stage, close, equal, scenario

STEPS = 30


def _cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


class Digits:
    """Handwritten digits, dealt so that no two ranks see the same ones."""

    def __init__(self) -> None:
        data = load_digits()
        self.images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(data.target)

    def loss(self, model: nn.Module, rank: int, step: int) -> torch.Tensor:
        chosen = torch.arange(16) + 16 * (4 * step + rank)
        return nn.functional.cross_entropy(
            model(self.images[chosen % len(self.labels)]), self.labels[chosen % len(self.labels)]
        )


@scenario(ranks=(2, 3), services=("plain", "slices of 64"), limit=60.0)
def thirty_steps_equal_the_single_process(stage: Stage) -> None:
    digits = Digits()
    steps = range(STEPS if stage.place.settings or "64" not in stage.name else 8)
    model, alone = seeded(_cnn, stage.rank), seeded(_cnn, 0)
    gradsum.broadcast_parameters(model.state_dict())
    optimizer = gradsum.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(),
        model=model,
    )  # fmt: skip
    train(model, optimizer, digits.loss, stage.rank, steps)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    train_alone(alone, plain, digits.loss, stage.size, steps)
    for (name, p), (_, q) in zip(weights(model), weights(alone), strict=True):
        if stage.size == 2:
            equal(p, q, name)
        else:
            close(p, q, 1e-5, name)
    stage.same(*model.parameters())
    gradsum.assert_in_sync(model)
    images, labels = digits.images[-200:], digits.labels[-200:]
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    if len(steps) == STEPS:
        assert right > 0.6, f"accuracy {right}"


@scenario(ranks=(2, 3), services=("plain", "slices of 64"), limit=60.0)
def thirty_steps_across_the_barrier(stage: Stage) -> None:
    """Two ranks: the same bits as one process that waits for all sums at each step."""
    digits = Digits()
    model, alone = seeded(_cnn, stage.rank), seeded(_cnn, 0)
    gradsum.broadcast_parameters(model.state_dict())
    optimizer = gradsum.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(),
        model=model, cross_barrier=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
    for step in range(STEPS):
        optimizer.zero_grad()
        digits.loss(model, stage.rank, step).backward()
        optimizer.step()
        schedule.step()
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    rates = torch.optim.lr_scheduler.StepLR(plain, 5, gamma=0.8)
    for step in range(STEPS):
        train_alone(alone, plain, digits.loss, stage.size, range(step, step + 1))
        rates.step()
    gradsum.assert_in_sync(model)
    for (name, p), (_, q) in zip(weights(model), weights(alone), strict=True):
        if stage.size == 2:
            equal(p, q, name)
        else:
            close(p, q, 1e-4, name)
    stage.same(*model.parameters())


@scenario(ranks=(3,), services=("ordered",))
def in_rank_order_three_ranks_equal_the_single_process_bit_for_bit(stage: Stage) -> None:
    digits = Digits()
    model, alone = seeded(_cnn), seeded(_cnn)
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, wrapped(inner, *model.named_parameters()), digits.loss, stage.rank, range(STEPS))
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    train_alone(alone, plain, digits.loss, 3, range(STEPS))
    for (name, p), (_, q) in zip(weights(model), weights(alone), strict=True):
        equal(p, q, name)


@scenario()
def a_fp16_model_with_gradient_scaling(stage: Stage) -> None:
    digits = Digits()
    model = seeded(_cnn)
    optimizer = wrapped(
        torch.optim.SGD(model.parameters(), lr=0.5), *model.named_parameters(),
        compression=gradsum.Compression.bf16,
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # overflows at first
    losses, scales = [], set()
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = digits.loss(model, stage.rank, step)
        scaler.scale(1000 * loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(gradsum.push_pull(loss.detach(), name="loss").item())
        equal(len(set(stage.gather(scaler.get_scale()))), 1, "scales")
        scales.add(scaler.get_scale())
    stage.same(*model.parameters())
    assert len(scales) > 1, "no step was skipped"
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), losses
