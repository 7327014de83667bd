"""Scripts of Horovod and BytePS that change in their import line only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradsum as bps
import gradsum.horovod as hvd
from gradsum.errors import MismatchError, UsageError
from tests.e2e.models import batch, mlp, seeded, square_loss, train_alone, weights
from tests.e2e.scenarios.ddp import Branches
from tests.e2e.scenarios.training import STEPS, Digits, _cnn
from tests.e2e.stage import Stage, close, equal, scenario


def _refused(kind: type[Exception], text: str, act: Any) -> None:
    try:
        act()
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"no {kind.__name__} that says {text!r}")


def _same_as_alone(
    stage: Stage, model: nn.Module, alone: nn.Module, lr: float = 0.1, sums: bool = False
) -> None:
    digits = Digits()
    rate = lr * stage.size if sums else lr
    plain = torch.optim.SGD(alone.parameters(), lr=rate, momentum=0.9)
    train_alone(alone, plain, digits.loss, stage.size, range(STEPS))
    for (name, p), (_, q) in zip(weights(model), weights(alone), strict=True):
        if stage.size == 2 and not sums:
            equal(p, q, name)
        else:
            close(p, q, 1e-5, name)
    stage.same(*model.parameters())


@scenario(ranks=(2, 3), limit=60.0)
def a_horovod_loop_equals_the_single_process(stage: Stage) -> None:
    digits = Digits()
    model, alone = seeded(_cnn, hvd.rank()), seeded(_cnn, 0)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none,
        op=hvd.Average, gradient_predivide_factor=2.0,
    )  # fmt: skip
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = digits.loss(model, stage.rank, step)
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        with optimizer.skip_synchronize():
            optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss")
    close(mean, sum(stage.gather(loss.item())) / stage.size)
    _same_as_alone(stage, model, alone)


@scenario()
def a_horovod_optimizer_that_sums(stage: Stage) -> None:
    digits = Digits()
    model, alone = seeded(_cnn, 0), seeded(_cnn, 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), model.named_parameters(),
        op=hvd.Sum,
    )  # fmt: skip
    for step in range(STEPS):
        optimizer.zero_grad()
        digits.loss(model, stage.rank, step).backward()
        optimizer.step()
    _same_as_alone(stage, model, alone, lr=0.02, sums=True)


@scenario(ranks=(2, 3))
def horovods_collectives(stage: Stage) -> None:
    rank, everyone = hvd.rank(), range(hvd.size())
    total = sum(everyone)
    summed = hvd.allreduce(torch.full((3,), float(rank)), op=hvd.Sum)
    equal(summed, torch.full((3,), float(total)))
    summed = hvd.allreduce(torch.tensor([1.0 * rank]), average=False, name="x")
    equal(summed, torch.tensor([1.0 * total]))
    close(hvd.allreduce(torch.tensor([2.0 * rank]), prescale_factor=0.5, postscale_factor=3.0),
          torch.tensor([3.0 * total / stage.size]))  # fmt: skip
    mine = torch.tensor([1.0, 2.0]) * (rank + 1)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    equal(mine, torch.tensor([1.0, 2.0]) * (total + stage.size))
    handles = [
        hvd.allreduce_async(torch.full((5,), float(rank + i)), op=hvd.Sum) for i in range(20)
    ]
    for i, handle in enumerate(handles):
        equal(hvd.synchronize(handle), torch.full((5,), float(total + stage.size * i)), f"call {i}")
        assert hvd.poll(handle)
    for each in hvd.grouped_allreduce([torch.ones(2), torch.ones(3, 3)], op=hvd.Sum):
        equal(each, torch.ones_like(each) * stage.size)
    rows = hvd.allgather(torch.arange(2.0 * rank).reshape(rank, 2))  # rank 0 has no row
    equal(rows, torch.cat([torch.arange(2.0 * r).reshape(r, 2) for r in everyone]))
    equal(hvd.allgather(torch.tensor(rank)), torch.tensor(list(everyone)))
    equal(hvd.allgather_object({"rank": rank, "much": "x" * rank}),
          [{"rank": r, "much": "x" * r} for r in everyone])  # fmt: skip
    given = batch(rank, 0)
    equal(hvd.broadcast(given, 1), batch(1, 0))
    equal(given, batch(rank, 0), "broadcast makes a new tensor")
    hvd.broadcast_(given, 1, name="given")
    equal(given, batch(1, 0))
    weight = torch.tensor([1.0 + rank], requires_grad=True)
    (hvd.allreduce(weight, op=hvd.Sum) * (rank + 1)).sum().backward()
    equal(weight.grad, torch.tensor([float(total + stage.size)]), "the gradient is summed too")
    equal((hvd.cross_size(), hvd.cross_rank(), hvd.local_rank()), (stage.size, rank, 0))
    assert not hvd.mpi_built() and hvd.is_homogeneous()


@scenario(ranks=(2,))
def what_horovod_has_and_gradsum_not_is_refused(stage: Stage) -> None:
    one = torch.ones(1)
    _refused(UsageError, "op=Adasum is not built", lambda: hvd.allreduce(one, op=hvd.Adasum))
    _refused(UsageError, "op=Min is not built", lambda: hvd.allreduce(one, op=hvd.Min))
    _refused(ValueError, "not both", lambda: hvd.allreduce(one, average=True, op=hvd.Sum))
    _refused(UsageError, "process sets", lambda: hvd.allreduce(one, process_set=object()))  # type: ignore[arg-type]
    odd = torch.ones(2, 1 + stage.rank)
    _refused(MismatchError, "rank 0 has rows of", lambda: hvd.allgather(odd, "odd"))
    equal(hvd.allreduce(one), one, "the job goes on")


@scenario(ranks=(2, 3))
def c28_horovods_join_with_uneven_batches(stage: Stage) -> None:
    model = seeded(mlp, 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for step in range(3 + stage.rank):
        optimizer.zero_grad()
        square_loss(model, stage.rank, step).backward()
        optimizer.step()
    equal(hvd.join(), stage.size - 1)
    stage.same(*model.parameters())


@scenario(ranks=(2, 3), limit=60.0)
def a_byteps_ddp_loop_equals_the_single_process(stage: Stage) -> None:
    digits = Digits()
    inner, alone = seeded(_cnn, bps.rank()), seeded(_cnn, 0)
    model = bps.DistributedDataParallel(inner, device_ids=[bps.local_rank()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        digits.loss(model, stage.rank, step).backward()
        optimizer.step()
    _same_as_alone(stage, inner, alone)


class Recomputing(nn.Module):
    """A layer that is used twice, the last time in a backward pass inside the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        inner = self.norm(self.shared(x))
        return {"out": checkpoint(self.shared, inner, use_reentrant=True)}


def _recomputed(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    loss: torch.Tensor = (model(batch(rank, step, 16, 4))["out"] * batch(9, step, 16, 4)).mean()
    return loss


@scenario(ranks=(2, 3))
def byteps_ddp_buffers_accumulation_and_recomputing(stage: Stage) -> None:
    """c50: the window ends with the whole backward pass, however often hooks fire in it."""
    inner = seeded(Recomputing, stage.rank)
    model = bps.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = seeded(Recomputing, 0)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            _recomputed(model, stage.rank, 10 * step).backward()
        _recomputed(model, stage.rank, 10 * step + 1).backward()
        optimizer.step()
        plain.zero_grad()
        for rank in range(stage.size):
            for part in range(2):
                (_recomputed(alone, rank, 10 * step + part) / stage.size).backward()
        plain.step()
        for (name, p), (_, q) in zip(weights(inner), weights(alone), strict=True):
            close(p, q, 1e-5, name)
    stage.same(*inner.parameters())
    equal(model._gradients.windows, 3, "windows")
    assert inner.norm.running_mean is not None
    model(batch(stage.rank, 99))
    means = stage.gather(inner.norm.running_mean.tolist())
    model(batch(0, 100))
    after = stage.gather(inner.norm.running_mean.tolist())
    assert means[0] != means[1] and after[0] == after[1], "buffers are rank 0's"


@scenario(ranks=(2,))
def byteps_ddp_with_unused_parameters(stage: Stage) -> None:
    inner = seeded(Branches, 0)
    model = bps.DistributedDataParallel(inner, broadcast_buffers=False)
    for step in range(3):
        model.zero_grad()
        model(batch(stage.rank, step), left=stage.rank == 0).pow(3).mean().backward()
        assert inner.never.weight.grad is None, "nobody used it"
        grads = [p.grad for p in (inner.left.weight, inner.right.weight, inner.first.weight)]
        assert all(grad is not None for grad in grads)
        stage.same(*(grad for grad in grads if grad is not None))


@scenario(ranks=(2, 3), limit=60.0)
def a_byteps_cross_barrier_loop_equals_the_single_process(stage: Stage) -> None:
    digits = Digits()
    model, alone = seeded(_cnn, bps.rank()), seeded(_cnn, 0)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = bps.CrossBarrier(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(), num_steps=STEPS,
    )  # fmt: skip
    for step in range(STEPS):
        optimizer.zero_grad()
        digits.loss(model, stage.rank, step).backward()
        optimizer.step()
    optimizer.flush()
    _same_as_alone(stage, model, alone)
