"""Stock DistributedDataParallel models whose gradients the service sums: ``gradsum.torch.attach``.

The process group is Gloo; what trains with it alone is what must come out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

import gradsum
import gradsum.torch
from gradsum.errors import UsageError
from tests.e2e.models import batch, mlp, seeded, train_alone, weights
from tests.e2e.scenarios.training import STEPS, Digits, _cnn
from tests.e2e.stage import Stage, close, equal, scenario

SMALL = 0.002
"""MiB of a bucket: several for a small model."""


@contextlib.contextmanager
def gloo(stage: Stage) -> Iterator[None]:
    """A process group of the scenario's ranks."""
    stage.meet()
    store = FileStore(str(stage.folder / f"store {stage.name}"), stage.size)
    dist.init_process_group("gloo", store=store, rank=stage.rank, world_size=stage.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def wrapped(model: nn.Module, **how: Any) -> DistributedDataParallel:
    """A model over the service, in several buckets."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL, **how)
    return gradsum.torch.attach(ddp)


@scenario(ranks=(2, 3), services=("plain", "slices of 64"), limit=60.0)
def ddp_equals_the_single_process(stage: Stage) -> None:
    digits = Digits()
    steps = range(STEPS if "64" not in stage.name else 8)
    model, alone = seeded(_cnn, stage.rank), seeded(_cnn, 0)
    with gloo(stage):
        ddp = wrapped(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for step in steps:
            optimizer.zero_grad()
            digits.loss(ddp, stage.rank, step).backward()
            optimizer.step()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    train_alone(alone, plain, digits.loss, stage.size, steps)
    for (name, p), (_, q) in zip(weights(model), weights(alone), strict=True):
        if stage.size == 2:
            equal(p, q, name)
        else:
            close(p, q, 1e-5, name)
    stage.same(*model.parameters())
    assert stage.pushes() >= 2 * len(steps), "the service summed nothing"


class Branches(nn.Module):
    """Uses one of two layers, and one of three never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(3, 2)
        self.never = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        out: torch.Tensor = self.norm((self.left if left else self.right)(hidden))
        return out


def _like_gloo(stage: Stage, make: Any, play: Any, **how: Any) -> None:
    """``play(ddp, optimizer)`` must do to a model over the service what it does over Gloo."""
    with gloo(stage):
        ours, theirs = seeded(make, stage.rank), seeded(make, stage.rank)
        for model, attach in ((theirs, False), (ours, True)):
            ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL, **how)
            if attach:
                gradsum.torch.attach(ddp)
            play(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    for (name, p), (_, q) in zip(
        ours.state_dict().items(), theirs.state_dict().items(), strict=True
    ):
        close(p, q, 1e-6, name)
    stage.same(*ours.parameters())


@scenario(ranks=(2, 3))
def ddp_unused_parameters_and_buffers(stage: Stage) -> None:
    def play(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        for step in range(6):
            optimizer.zero_grad()
            left = step > 2 or stage.rank == 0  # other ranks use other branches; later all the same
            ddp(batch(stage.rank, step), left).square().mean().backward()
            optimizer.step()
            assert ddp.module.never.weight.grad is None

    _like_gloo(stage, Branches, play, find_unused_parameters=True)


@scenario()
def ddp_accumulation_without_sync(stage: Stage) -> None:
    def play(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            optimizer.zero_grad()
            with ddp.no_sync():
                for part in range(2):
                    ddp(batch(stage.rank, 10 * step + part)).square().mean().backward()
            ddp(batch(stage.rank, 10 * step + 9)).square().mean().backward()
            optimizer.step()

    before = stage.pushes()
    _like_gloo(stage, mlp, play)
    pushed = stage.pushes() - before
    assert pushed <= 4 * 4, f"{pushed} pushes: gradients travelled inside no_sync"


@scenario()
def ddp_static_graph_and_bucket_views(stage: Stage) -> None:
    def play(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            out = ddp(batch(stage.rank, step))
            out.square().mean().backward()
            optimizer.step()

    _like_gloo(stage, mlp, play, static_graph=True, gradient_as_bucket_view=True)


@scenario(ranks=(2, 3))
def c28_ddp_join_with_uneven_batches(stage: Stage) -> None:
    def play(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        with ddp.join():
            for step in range(3 + 2 * stage.rank):
                optimizer.zero_grad()
                ddp(batch(stage.rank, step)).square().mean().backward()
                optimizer.step()

    _like_gloo(stage, mlp, play)


@scenario()
def c02_ddp_ranks_agree_about_skipping(stage: Stage) -> None:
    """An infinity on one rank: both skip the step and halve the scale."""
    with gloo(stage):
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        ddp = wrapped(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for inputs, weight, scale in (((2.0, float("inf")), 1.0, 2.0), ((2.0, 4.0), 0.7, 2.0)):
            optimizer.zero_grad()
            scaler.scale(ddp(torch.tensor([[stage.mine(*inputs)]])).sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()
            close(model.weight.item(), weight)
            equal(scaler.get_scale(), scale)


@scenario()
def ddp_bf16_on_the_wire_and_two_models(stage: Stage) -> None:
    """The same bits on both ranks, near what whole gradients give; two models keep apart."""
    with gloo(stage):
        models = [seeded(mlp, 1), seeded(mlp, 1)]
        ddps = [DistributedDataParallel(model) for model in models]
        gradsum.torch.attach(ddps[0], gradsum.Compression.bf16)
        gradsum.torch.attach(ddps[1])
        for ddp in ddps:
            ddp(batch(stage.rank, 0)).square().mean().backward()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        close(p.grad, q.grad, 0.02)
        assert not torch.equal(p.grad, q.grad), "nothing was cast"
    stage.same(*(p.grad for p in models[0].parameters() if p.grad is not None))


KEPT: list[DistributedDataParallel] = []
"""torch's join leaves a call under way when it ends by an error; a Gloo group that is freed then
waits with Python's lock held for its thread, which waits for the lock (torch 2.13)."""


@scenario(ranks=(3,))
def ddp_refusals_name_the_reason(stage: Stage) -> None:
    with gloo(stage):
        pair = dist.new_group([0, 1])
        _refused(TypeError, "wrap the model first", lambda: gradsum.torch.attach(mlp()))  # type: ignore[arg-type]
        if stage.rank < 2:
            alone = DistributedDataParallel(mlp(), process_group=pair, init_sync=False)
            _refused(UsageError, "rank . of 2, gradsum has . of 3",
                     lambda: gradsum.torch.attach(alone))  # fmt: skip
        ddp = wrapped(mlp())
        KEPT.append(ddp)

        def part() -> None:
            with ddp.join(divide_by_initial_world_size=False):
                ddp(batch(stage.rank, 0)).sum().backward()

        _refused(UsageError, "divided by all ranks", part)


def _refused(kind: type[Exception], text: str, act: Any) -> None:
    import re

    try:
        act()
    except kind as error:
        assert re.search(text, str(error)), error
        return
    raise AssertionError(f"no {kind.__name__} that says {text!r}")


@scenario()
def a_rank_that_stays_away_ends_the_backward_pass(stage: Stage) -> None:
    """torch waits in C++ without a limit; the sum's own one ends it, naming tensor and rank."""
    stage.again(stall_timeout=2.0, stall_warning=1.0)
    with gloo(stage):
        ddp = wrapped(mlp())
        if stage.rank == 0:
            _refused(RuntimeError, r"ddp0/.*not complete after 2 s: waiting for rank 1",
                     lambda: ddp(batch(0, 0)).sum().backward())  # fmt: skip
        stage.meet()
