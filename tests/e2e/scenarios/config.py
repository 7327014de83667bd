"""Slices, credit, packing and placement: settings change the way, never the result."""

from __future__ import annotations

from typing import Any

import torch

import gradsum
from gradsum.errors import ConfigError
from tests.e2e.models import (
    mlp,
    parameter,
    push,
    seeded,
    sgd,
    square_loss,
    train,
    train_alone,
    weights,
    wrapped,
)
from tests.e2e.scenarios.api_semantics import raises
from tests.e2e.stage import Stage, equal, scenario, within

ODD = ("slices of 10", "slices of 4097", "slices of 3", "slices of 64", "huge")


@scenario(services=ODD, limit=40.0)
def c35_slices_are_whole_elements(stage: Stage) -> None:
    for dtype, count in (
        (torch.float32, 7),
        (torch.float64, 1000),
        (torch.bfloat16, 101),
        (torch.complex128, 33),
        (torch.int16, 5),
    ):
        if dtype == torch.bfloat16 and "of 3" not in stage.name:
            continue  # one service that loads torch is enough
        given = torch.arange(count).to(dtype)
        total = gradsum.push_pull(given, average=False, name=f"x {dtype}")
        equal(total, 2 * torch.arange(count).to(dtype), str(dtype))
    mean = gradsum.push_pull(torch.arange(7.0) * stage.mine(1, 3), name="mean")
    equal(mean, 2 * torch.arange(7.0))


@scenario(ranks=(1,), services=("alone",))
def c35_bad_sizes_are_refused_at_init(stage: Stage) -> None:
    gradsum.shutdown()
    for bad in (0, -1, "abc"):
        raises(ConfigError, lambda b=bad: gradsum.init(slice_bytes=b), "slice_bytes", repr(bad))
        raises(ConfigError, lambda b=bad: gradsum.init(credit_bytes=b), "credit_bytes", repr(bad))
    gradsum.init(slice_bytes="4e6")
    equal(stage.session.settings.slice_bytes, 4_000_000)


@scenario(services=("tiny credit", "huge"))
def c61_credit_smaller_than_a_slice(stage: Stage) -> None:
    given = torch.arange(262_144.0) * stage.mine(1.0, 3.0)
    with within(5.0, "1 MiB"):
        total = gradsum.push_pull(given, average=False, name="x")
    equal(total, 4 * torch.arange(262_144.0))
    model, alone = seeded(mlp), seeded(mlp)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), *model.named_parameters())
    train(model, optimizer, square_loss, stage.rank, range(6))
    train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), square_loss, 2, range(6))
    for (name, p), (_, q) in zip(weights(model), weights(alone), strict=True):
        equal(p, q, name)


@scenario(ranks=(3,), services=("three servers",))
def c46_all_processes_agree_on_the_placement(stage: Stage) -> Any:
    """Every rank has another PYTHONHASHSEED."""
    names = [f"tensor {i}" for i in range(20)]
    assert len(set(stage.gather(hash("tensor 0") % 1_000_003))) == 3
    with within(10.0, "20 tensors"):
        given = {name: torch.full((40 * i + 1,), stage.rank + 1.0) for i, name in enumerate(names)}
        for name in names if stage.rank < 2 else reversed(names):
            handle = gradsum.push_pull_async(given[name], average=False, name=name)
            given[name] = handle  # type: ignore[assignment]
        for i, name in enumerate(names):
            equal(gradsum.synchronize(given[name]), torch.full((40 * i + 1,), 6.0))  # type: ignore[arg-type]
    placement = stage.placement()
    servers = {server for _, slices in placement for server in slices}
    equal(servers, {0, 1, 2})
    return sorted(placement)


@scenario(ranks=(2, 3))
def packing_begins_at_the_first_fence(stage: Stage) -> None:
    ps = [parameter(*[0.0] * (i + 1)) for i in range(20)]
    ps += [parameter(0.0, 0.0, dtype=torch.float64) for _ in range(3)]
    optimizer = sgd(*ps, lr=1.0)
    first_epoch = stage.epoch()
    pushes, packed_steps = [], 0
    for step in range(1, 200):
        before = stage.pushes()
        optimizer.zero_grad()
        for i, p in enumerate(reversed(ps)):
            if step % 3 or i % 4:  # some are absent now and then, whole units too
                push(p, float((stage.rank + 1) * step))
        optimizer.step()
        mean = (stage.size + 1) / 2 * step
        pushes.append(stage.pushes() - before)
        for i, p in enumerate(reversed(ps)):
            equal(p.grad is not None, bool(step % 3 or i % 4), f"gradient {i} in step {step}")
            if p.grad is not None:
                equal(p.grad, torch.full_like(p, mean), f"gradient {i} in step {step}")
        if stage.epoch() > first_epoch:
            packed_steps += 1
        if packed_steps == 8:
            break
    equal(packed_steps, 8, "steps with packing in force")
    status = stage.status()
    equal(status["epoch"], stage.epoch())
    assert status["packing"] >= len(ps)
    equal(pushes[0], len(ps), "pushes before packing")
    equal(pushes[-1], 2, "pushes after packing: one buffer per dtype")
    assert len(set(stage.gather(stage.epoch()))) == 1
    stage.same(*ps)


@scenario(services=("unpacked",))
def packing_can_be_turned_off(stage: Stage) -> None:
    ps = [parameter(0.0) for _ in range(5)]
    optimizer = sgd(*ps, lr=1.0)
    epoch = stage.epoch()
    for step in range(1, 15):
        before = stage.pushes()
        optimizer.zero_grad()
        for p in ps:
            push(p, stage.mine(1.0, 3.0))
        optimizer.step()
        equal(stage.pushes() - before, 5)
        equal([p.item() for p in ps], [-2.0 * step] * 5)
    equal((stage.status()["packing"], stage.epoch()), (0, epoch))
