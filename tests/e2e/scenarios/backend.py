"""The torch.distributed backend "gradsum": collectives, stock DDP, FSDP2 and HSDP on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import gradsum.torch
from tests.e2e.models import batch, seeded, train_alone, weights
from tests.e2e.scenarios.training import STEPS, Digits, _cnn
from tests.e2e.stage import Stage, close, equal, scenario


@contextlib.contextmanager
def group(stage: Stage, backend: str = "gradsum") -> Iterator[None]:
    """The default process group, of the scenario's ranks."""
    assert gradsum.torch.attach is not None
    stage.meet()
    store = FileStore(str(stage.folder / f"store {stage.name} {backend}"), stage.size)
    dist.init_process_group(backend, store=store, rank=stage.rank, world_size=stage.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@scenario(ranks=(2, 3), services=("plain", "slices of 64"), limit=60.0)
def stock_ddp_on_the_backend_equals_the_single_process(stage: Stage) -> None:
    digits = Digits()
    steps = range(STEPS if "64" not in stage.name else 8)
    model, alone = seeded(_cnn, stage.rank), seeded(_cnn, 0)
    with group(stage):
        assert dist.get_backend() == "gradsum"
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for step in steps:
            optimizer.zero_grad()
            digits.loss(ddp, stage.rank, step).backward()
            optimizer.step()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    train_alone(alone, plain, digits.loss, stage.size, steps)
    for (name, p), (_, q) in zip(weights(model), weights(alone), strict=True):
        close(p, q, 1e-5, name)
    stage.same(*model.parameters())
    assert stage.pushes() >= 2 * len(steps), "the service summed nothing"


@scenario(ranks=(2, 3), limit=60.0)
def fsdp2_and_hsdp_on_the_backend_equal_the_single_process(stage: Stage) -> None:
    digits, steps = Digits(), range(8)
    with group(stage):
        for shape in ((stage.size,), (stage.size, 1)):
            names = ("replicate", "shard")[-len(shape) :]
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            model, alone = seeded(_cnn), seeded(_cnn)
            before = stage.pushes()
            for layer in model:
                if isinstance(layer, nn.Conv2d):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for step in steps:
                optimizer.zero_grad()
                digits.loss(model, stage.rank, step).backward()
                optimizer.step()
            plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
            train_alone(alone, plain, digits.loss, stage.size, steps)
            for (name, p), (_, q) in zip(weights(model), weights(alone), strict=True):
                assert isinstance(p, DTensor)
                close(p.full_tensor(), q, 1e-5, name)
            summed = stage.pushes() - before
            assert len(shape) == 1 or summed >= 2 * len(steps), "replicas were not summed"


@scenario(ranks=(2, 3))
def sums_and_means_of_all_kinds(stage: Stage) -> None:
    everyone = range(stage.size)
    with group(stage):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8):
            mine = torch.arange(6).reshape(2, 3).to(dtype) + stage.rank
            whole = sum(torch.arange(6).reshape(2, 3) + rank for rank in everyone)
            assert isinstance(whole, torch.Tensor)
            strided = torch.zeros(3, 2, dtype=dtype).t()
            strided.copy_(mine)
            for tensor in (mine, strided):
                dist.all_reduce(tensor)
                equal(tensor, whole.to(dtype), str(dtype))
        mean = torch.tensor([1.0, 2.0]) * stage.rank
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        equal(mean, torch.tensor([1.0, 2.0]) * sum(everyone) / stage.size)
        turned = torch.tensor([1 + 2j]) * (stage.rank + 1)
        dist.all_reduce(turned)
        equal(turned, torch.tensor([1 + 2j]) * sum(r + 1 for r in everyone))
        for operation, result in (
            (dist.ReduceOp.MAX, stage.size), (dist.ReduceOp.MIN, 1),
            (dist.ReduceOp.PRODUCT, 2 if stage.size == 2 else 6),
        ):  # fmt: skip
            value = torch.tensor([stage.rank + 1])
            dist.all_reduce(value, operation)
            equal(value, torch.tensor([result]))
        scalar, none = torch.tensor(float(stage.rank)), torch.empty(0, 3)
        dist.all_reduce(scalar)
        dist.all_reduce(none)
        equal(scalar, torch.tensor(float(sum(everyone))))
        out = functional.all_reduce(torch.ones(3) * stage.rank, "sum", list(everyone))
        equal(out.wait() if hasattr(out, "wait") else out, torch.ones(3) * sum(everyone))


@scenario(ranks=(3,))
def many_calls_at_once_and_smaller_groups(stage: Stage) -> None:
    with group(stage):
        tensors = [torch.full((500,), float(stage.rank + i)) for i in range(40)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for i, work in enumerate(works):
            assert work is not None
            if i % 2:
                work.wait()
            else:
                equal(work.get_future().wait()[0], torch.full((500,), 3.0 + 3 * i))
            assert work.is_completed()
            equal(tensors[i], torch.full((500,), 3.0 + 3 * i), f"call {i}")
        with dist._coalescing_manager(async_ops=True) as together:  # type: ignore[attr-defined]
            pair = [torch.ones(2) * stage.rank, torch.ones(5)]
            for tensor in pair:
                dist.all_reduce(tensor)
        together.wait()
        equal(pair[0], torch.ones(2) * 3)
        equal(pair[1], torch.ones(5) * 3)
        sub, again = dist.new_group([0, 2]), dist.new_group([0, 1, 2])
        value = torch.tensor([1.0 + stage.rank])
        if stage.rank != 1:
            dist.all_reduce(value, group=sub)
            equal(value, torch.tensor([4.0]))
        whole = torch.tensor([1.0 + stage.rank])
        dist.all_reduce(whole, group=again)
        equal(whole, torch.tensor([6.0]))


@scenario(ranks=(2, 3))
def what_is_no_sum_goes_over_gloo(stage: Stage) -> None:
    everyone = list(range(stage.size))
    with group(stage):
        mine = batch(stage.rank, 0)
        found = [torch.empty(3, 4) for _ in everyone]
        dist.all_gather(found, mine)
        for rank in everyone:
            equal(found[rank], batch(rank, 0))
        copy = mine.clone()
        dist.broadcast(copy, stage.size - 1)
        equal(copy, batch(stage.size - 1, 0))
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(2.0 * stage.size))
        equal(part, torch.arange(2.0 * stage.rank, 2.0 * stage.rank + 2) * stage.size)
        _one_to_all_and_back(stage)
        peer = (stage.rank + 1) % stage.size
        got = torch.empty(1)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, torch.tensor([float(stage.rank)]), peer),
            dist.P2POp(dist.irecv, got, (stage.rank - 1) % stage.size),
        ])  # fmt: skip
        for work in works:
            work.wait()
        equal(got, torch.tensor([float((stage.rank - 1) % stage.size)]))
        objects: list[object] = [None] * stage.size
        dist.all_gather_object(objects, {"rank": stage.rank})
        equal(objects, [{"rank": rank} for rank in everyone])
        dist.barrier()
        mesh = init_device_mesh("cpu", (stage.size,))
        sharded = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        for _ in range(300):  # with Python's lock held these calls end in a deadlock
            equal(sharded.full_tensor(), torch.arange(6.0))


def _one_to_all_and_back(stage: Stage) -> None:
    """gather, scatter, reduce and all_to_all, as tensors and as lists."""
    rank, everyone = stage.rank, range(stage.size)
    held = [torch.empty(2) for _ in everyone] if rank == 0 else None
    dist.gather(torch.ones(2) * rank, held)
    for number, tensor in enumerate(held or ()):
        equal(tensor, torch.ones(2) * number)
    dealt = torch.empty(2)
    dist.scatter(dealt, [torch.ones(2) * number for number in everyone] if rank == 0 else None)
    equal(dealt, torch.ones(2) * rank)
    total = torch.ones(2) * rank
    dist.reduce(total, 0)
    if rank == 0:
        equal(total, torch.ones(2) * sum(everyone))
    parts = torch.empty(2)
    dist.reduce_scatter(parts, [torch.ones(2) * (rank + number) for number in everyone])
    equal(parts, torch.ones(2) * (sum(everyone) + stage.size * rank))
    turned = torch.empty(stage.size)
    dist.all_to_all_single(turned, torch.arange(float(stage.size)) + 10 * rank)
    equal(turned, 10 * torch.arange(float(stage.size)) + rank)
    swapped = [torch.empty(2) for _ in everyone]
    dist.all_to_all(swapped, [torch.ones(2) * (10 * rank + number) for number in everyone])
    equal(torch.stack(swapped)[:, 0], 10 * torch.arange(float(stage.size)) + rank)
