"""Values: which sums, which divisor, whose bytes."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import torch
from torch import nn

import gradsum
from tests.e2e.models import parameter, push, sgd, wrapped
from tests.e2e.stage import Stage, close, digest, equal, scenario, within


@scenario()
def c02_ranks_agree_about_skipping(stage: Stage) -> None:
    for explicit in (False, True):
        p = parameter(1.0)
        optimizer = sgd(p)
        scaler = torch.amp.GradScaler("cpu", init_scale=4)
        for step, grad in enumerate((stage.mine(2.0, float("inf")), stage.mine(2.0, 4.0))):
            with within(10.0, "a scaled step"):
                optimizer.zero_grad()
                scaler.scale((p * grad).sum()).backward()
                if explicit:
                    optimizer.synchronize()
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            if step == 0:
                equal((p.item(), scaler.get_scale()), (1.0, 2.0))
        close(p.item(), 0.7)
        stage.same(p)


@scenario(services=("plain", "one server"))
def c10_memory_is_free_after_the_wait(stage: Stage) -> None:
    tensor = torch.empty(50_000)
    for step in range(50):
        tensor.fill_(step + 1.0)
        if step % 10 == 5:
            with stage.stopped_servers(0.3):
                result = gradsum.push_pull(tensor, average=False, name="x")
        else:
            result = gradsum.push_pull(tensor, average=False, name="x")
        tensor.fill_(-1e6)
        equal(result, torch.full((50_000,), 2.0 * (step + 1)), f"round {step}")


@scenario(services=("plain", "slices of 64"))
def c22_unused_parameters_do_not_move(stage: Stage) -> None:
    p, used = parameter(1.0), parameter(0.0)
    optimizer = sgd(p, used, weight_decay=0.1)
    for _ in range(8):  # before and after packing
        optimizer.zero_grad()
        push(used, 1.0)
        optimizer.step()
        equal((p.item(), p.grad), (1.0, None))
    q, other = parameter(1.0), parameter(0.0)
    adam = wrapped(torch.optim.Adam([q, other], lr=0.1), ("q", q), ("other", other))
    push(q, stage.mine(0.5, 1.5))
    push(other, 1.0)
    adam.step()
    close(q.item(), 0.9)
    after_one = q.item()
    for _ in range(8):
        adam.zero_grad()
        push(other, 1.0)
        adam.step()
        equal((q.item(), q.grad), (after_one, None))
    stage.same(p, q, used, other)


@scenario(services=("plain", "slices of 64"))
def parameters_used_on_some_ranks_only(stage: Stage) -> None:
    ps = [parameter(*[0.0] * (3 + i)) for i in range(4)]
    optimizer = sgd(*ps, lr=1.0)
    expected = [0.0] * 4
    for step in range(10):
        optimizer.zero_grad()
        used_by = [{0, 1}, {step % 2}, {0} if step % 3 else set(), set()]
        for i, users in enumerate(used_by):
            grads = [(r + 1.0) * (i + 1) * (step + 1) for r in sorted(users)]
            expected[i] -= sum(grads) / 2
            if stage.rank in users:
                push(ps[i], (stage.rank + 1.0) * (i + 1) * (step + 1))
        optimizer.step()
        for i, p in enumerate(ps):
            equal(p.detach(), torch.full(p.shape, expected[i]), f"p{i}, step {step}")
            equal(p.grad is None, not used_by[i], f"gradient of p{i}, step {step}")
    stage.same(*ps)


@scenario()
def c47_a_second_push_is_the_next_round(stage: Stage) -> None:
    if stage.rank == 1:
        stage.meet()  # rank 0 has pushed twice
    handles = [
        gradsum.push_pull_async(torch.tensor([value]), average=False, name="x")
        for value in stage.mine((1.0, 100.0), (2.0, 200.0))
    ]
    if stage.rank == 0:
        stage.meet()
    equal([gradsum.synchronize(handle).item() for handle in handles], [3.0, 300.0])


@scenario()
def c55_a_new_temporary_each_time(stage: Stage) -> None:
    for size in (1, 10, 1000):
        for i in range(5):
            for make in ("plain", "half"):
                t = torch.full((size,), float(i) + 10 * stage.rank)
                t = t.half() if make == "half" else t
                result = gradsum.push_pull_inplace(t, average=False, name=f"tmp {make} {size}")
                assert result is t
                equal(t, torch.full((size,), 2.0 * i + 10).to(t.dtype))
                del t, result
                gc.collect(1)  # a full collection takes a tenth of a second


@scenario(ranks=(3,), services=("plain", "ordered"))
def c65_all_ranks_get_the_same_bits(stage: Stage) -> Any:
    delays = random.Random(stage.rank)
    given = torch.tensor([1e8, 1.0, -1e8][stage.rank :] + [1e8, 1.0, -1e8][: stage.rank])
    seen = set()
    for _ in range(50):
        time.sleep(delays.random() * 0.003)  # ranks arrive in another order each time
        total = gradsum.push_pull(given, average=False, name="x")
        stage.same(total)
        assert set(total.tolist()) <= {0.0, 1.0}, total
        seen.add(tuple(total.tolist()))
    return sorted(seen) if "ordered" in stage.name else None


@scenario(ranks=(4,), services=("ordered",), limit=40.0)
def the_same_bits_on_every_run_with_four_ranks(stage: Stage) -> Any:
    delays = random.Random(stage.rank)
    sizes = (1, 1000, 300_000)
    data = {n: torch.randn(n, generator=torch.Generator().manual_seed(stage.rank)) for n in sizes}
    ps = [nn.Parameter(torch.zeros(n)) for n in sizes]
    first: list[str] = []
    optimizer = sgd(*ps)
    for run in range(20):
        if run in (7, 14):
            stage.again()
            optimizer = sgd(*ps)
        optimizer.zero_grad()
        for p in ps:
            time.sleep(delays.random() * 0.004)
            p.grad = data[p.numel()].clone()
        optimizer.synchronize()
        results = [digest(p.grad) for p in ps if p.grad is not None]
        for n in sizes:
            time.sleep(delays.random() * 0.004)
            results.append(digest(gradsum.push_pull(data[n], average=False, name=f"x{n}")))
        first = first or results
        equal(results, first, f"run {run}")
    everybody = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    expected = everybody[0] + everybody[1] + everybody[2] + everybody[3]
    equal(digest(expected), first[4], "rank order")
    return first


@scenario(ranks=(3,))
def a_mean_of_three_divides_by_three(stage: Stage) -> None:
    given = torch.tensor([stage.mine(1.0, 2.0, 6.0), stage.mine(0.5, -0.5, 1.5)])
    equal(gradsum.push_pull(given, name="x"), torch.tensor([3.0, 0.5]))
    p = parameter(0.0)
    optimizer = sgd(p, lr=1.0)
    for step in range(1, 6):
        optimizer.zero_grad()
        if stage.rank != 2:  # absent ranks count in the divisor
            push(p, 3.0)
        optimizer.step()
        equal(p.item(), -2.0 * step)
    stage.same(p)
