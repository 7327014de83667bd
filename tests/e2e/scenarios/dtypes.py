"""Element types, shapes and memory layouts."""

from __future__ import annotations

import torch
from torch import nn

import gradsum
from gradsum.worker.tensors import SUMMED
from tests.e2e.models import batch, mean_gradients, parameter, push, seeded, sgd, wrapped
from tests.e2e.stage import Stage, close, equal, scenario, within


@scenario(limit=30.0)  # the servers load torch for the first half type
def c01_bfloat16_model_and_mean(stage: Stage) -> None:
    model = seeded(lambda: nn.Linear(2, 2)).bfloat16()
    gradsum.broadcast_parameters(model.state_dict())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.5), *model.named_parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, stage.mine(1.5, 2.5))
    optimizer.step()
    for name, p in model.named_parameters():
        equal(p.detach(), before[name] - 0.5 * torch.full_like(p, 2.0), name)
    stage.same(*model.parameters())
    given = stage.mine([1.5, -3.0], [2.5, 5.0])
    mean = gradsum.push_pull(torch.tensor(given, dtype=torch.bfloat16), name="v")
    equal(mean, torch.tensor([2.0, 1.0], dtype=torch.bfloat16))


@scenario(limit=30.0)
def half_types_whose_sum_overflows_keep_their_mean(stage: Stage) -> None:
    for dtype, big in ((torch.float16, 60000.0), (torch.bfloat16, 1.6e38)):
        given = torch.tensor([big, -big, 1.0, 2.0**-24], dtype=dtype)
        mean = gradsum.push_pull(given, name=f"big {dtype}")
        equal(mean, given, str(dtype))
    small = torch.full((5,), stage.mine(1.0, 2.0**-11), dtype=torch.float16)
    total = gradsum.push_pull(small, average=False, name="small")
    equal(total, torch.full((5,), 1.0, dtype=torch.float16))  # 1 + 2**-11, rounded once, to even


@scenario(ranks=(2, 3), limit=30.0)
def every_dtype_is_summed_and_averaged(stage: Stage) -> None:
    for dtype in SUMMED:
        own = [torch.tensor([r + 1, -7 * r, 40 - r, 2]).to(dtype) for r in range(stage.size)]
        if dtype == torch.uint8:
            own = [torch.tensor([r + 1, 7 * r, 80 - r, 2], dtype=dtype) for r in range(stage.size)]
        wide = [each.to(torch.complex128) for each in own]
        expected = sum(wide[1:], wide[0])
        got = gradsum.push_pull(own[stage.rank], average=False, name=f"sum {dtype}")
        equal(got.dtype, dtype)
        close(got.to(torch.complex128), expected, what=f"sum of {dtype}")
        mean = gradsum.push_pull(own[stage.rank], name=f"mean {dtype}")
        stage.same(got, mean)
        if dtype.is_floating_point or dtype.is_complex:
            tolerance = 0.05 if dtype.itemsize <= 2 or dtype == torch.complex32 else 1e-5
            close(mean.to(torch.complex128), expected / stage.size, tolerance, f"mean of {dtype}")
        else:
            floor = torch.div(expected.real.long(), stage.size, rounding_mode="floor")
            equal(mean, floor.to(dtype), f"floor mean of {dtype}")


@scenario()
def c49_complex_gradients(stage: Stage) -> None:
    for dtype in (torch.complex64, torch.complex128):
        given = torch.tensor([stage.mine(1 + 2j, 3 - 4j)], dtype=dtype)
        mean = gradsum.push_pull(given, name=f"mean {dtype}")
        equal(mean, torch.tensor([2 - 1j], dtype=dtype))
        p = nn.Parameter(torch.zeros(1, dtype=dtype))
        how = {"compression": gradsum.Compression.fp16} if dtype == torch.complex64 else {}
        optimizer = wrapped(torch.optim.SGD([p], lr=1.0), (f"p{dtype}", p), **how)
        p.grad = given.clone()
        optimizer.step()
        equal(p.detach(), torch.tensor([-2 + 1j], dtype=dtype))
        stage.same(p)


@scenario()
def c67_conjugated_and_negated_views(stage: Stage) -> None:
    given = stage.mine(torch.tensor([1 + 2j]).conj(), torch.tensor([3 + 4j]))
    equal(given.is_conj(), stage.rank == 0)
    equal(gradsum.push_pull(given, average=False, name="c"), torch.tensor([4 + 2j]))
    given = stage.mine(torch.tensor([1 + 2j]).conj().imag, torch.tensor([5.0]))
    equal(given.is_neg(), stage.rank == 0)
    equal(gradsum.push_pull(given, average=False, name="n"), torch.tensor([3.0]))


@scenario()
def c71_memory_layouts_differ_between_ranks(stage: Stage) -> None:
    conv = nn.Conv2d(4, 4, 3, bias=False)
    if stage.rank == 0:
        conv = conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    values = torch.arange(144.0).view(4, 4, 3, 3)
    with torch.no_grad():
        conv.weight.zero_()
    optimizer = wrapped(torch.optim.SGD(conv.parameters(), lr=1.0), *conv.named_parameters())
    for step in range(3):  # the hooks push early from the second window on
        optimizer.zero_grad()
        conv(batch(stage.rank, step, 1, 4, 5, 5)).sum().backward()
        assert conv.weight.grad is not None
        strides = conv.weight.grad.stride()
        optimizer.synchronize()
        stage.same(conv.weight.grad)
        equal(conv.weight.grad.stride(), strides)
    optimizer.zero_grad(set_to_none=False)
    assert conv.weight.grad is not None
    with torch.no_grad():
        conv.weight.grad.copy_(values)
    strides = conv.weight.grad.stride()
    equal(strides, stage.mine((36, 1, 12, 4), (36, 9, 3, 1)))
    optimizer.step()
    equal(conv.weight.grad, values)
    equal(conv.weight.grad.stride(), strides)
    equal(conv.weight.detach(), -values)


@scenario()
def views_with_gaps_and_offsets(stage: Stage) -> None:
    base = torch.arange(60.0).view(6, 10) + 100 * stage.rank
    for i, view in enumerate((base[::2, 1:9:3], base.t(), base[3], base[:, 4], base[1:1])):
        other = view + (100 if stage.rank == 0 else -100)
        given = view.clone()
        equal(gradsum.push_pull(view, average=False, name=f"view {i}"), given + other)
    target = base[1::2, ::4]
    expected = (target + (100 if stage.rank == 0 else -100) + target) / 2
    rest = base[::2].clone()
    gradsum.push_pull_inplace(target, name="target")
    equal(base[1::2, ::4], expected)
    equal(base[::2], rest)


@scenario()
def c79_parameters_without_elements(stage: Stage) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.body(x)
            return torch.cat([x, self.head(x)], dim=1)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        result: torch.Tensor = model(batch(rank, step)).square().sum()
        return result

    model, alone = seeded(Wide), seeded(Wide)
    with within(5.0, "a model with an empty head"):
        gradsum.broadcast_parameters(model.state_dict())
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.01), *model.named_parameters())
        for step in range(4):
            optimizer.zero_grad()
            loss(model, stage.rank, step).backward()
            optimizer.step()
            mean_gradients(alone.parameters(), 2, loss, alone, step=step)
            torch.optim.SGD(alone.parameters(), lr=0.01).step()
        got = gradsum.push_pull(torch.empty(0, 3), name="empty")
    equal(tuple(got.shape), (0, 3))
    equal(tuple(model.head.weight.shape), (0, 4))
    equal(tuple(model.head.bias.shape), (0,))
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        equal(p.detach(), q.detach())


@scenario()
def c94_metrics(stage: Stage) -> None:
    mean = gradsum.push_pull(torch.tensor(stage.mine(3.0, 5.0)), name="loss")
    equal((mean.item(), tuple(mean.shape)), (4.0, ()))
    total = gradsum.push_pull(torch.tensor(4), average=False, name="count")
    equal((total.item(), total.dtype), (8, torch.int64))
    p = parameter(2.0)
    loss = (p * stage.mine(3.0, 5.0)).sum()
    seen = gradsum.push_pull(loss, name="live loss")
    equal((seen.item(), seen.requires_grad), (8.0, False))
    loss.backward()
    assert p.grad is not None
    equal(p.grad.item(), stage.mine(3.0, 5.0))


@scenario(limit=30.0)
def several_dtypes_in_one_optimizer(stage: Stage) -> None:
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float32)
    ps = [parameter(0.0, 0.0, dtype=dtype) for dtype in dtypes]
    optimizer = sgd(*ps, lr=1.0)
    for step in range(1, 9):
        optimizer.zero_grad()
        for i, p in enumerate(ps):
            push(p, float(stage.mine(1, 3) * (i + 1)))
        optimizer.step()
        for i, p in enumerate(ps):
            equal(p.detach(), torch.full((2,), -2.0 * (i + 1) * step).to(p.dtype), f"step {step}")
    stage.same(*ps)


@scenario()
def c07_duplicate_rows_of_a_sparse_gradient(stage: Stage) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer = wrapped(torch.optim.SGD(table.parameters(), lr=1.0), *table.named_parameters())
    expected = torch.zeros(5, 2)
    expected[1] = expected[3] = 1.0
    with stage.listening():
        for step in range(1, 4):
            optimizer.zero_grad()
            table(torch.tensor(stage.mine([1, 1, 3], [3]))).sum().backward()
            optimizer.synchronize()
            assert table.weight.grad is not None
            equal(table.weight.grad.to_dense(), expected)
            optimizer.step()
            equal(table.weight.detach(), -step * expected)
    equal(len([text for text in stage.notices if "sparse" in text]), 1, "notices")
    stage.same(table.weight)


@scenario()
def c23_sparse_gradient_that_is_empty_on_one_rank(stage: Stage) -> None:
    for kind in (torch.optim.SGD, torch.optim.Adam):
        table = nn.Embedding(5, 2, padding_idx=0, sparse=True)
        optimizer = wrapped(kind(table.parameters(), lr=0.1), *table.named_parameters())
        table(torch.tensor(stage.mine([0, 0], [2]))).sum().backward()
        optimizer.synchronize()
        expected = torch.zeros(5, 2)
        expected[2] = 0.5
        assert table.weight.grad is not None
        equal(table.weight.grad.to_dense(), expected)
        optimizer.step()
        optimizer.zero_grad()
        table(torch.tensor([0])).sum().backward()
        optimizer.synchronize()
        equal(table.weight.grad.to_dense(), torch.zeros(5, 2))
        optimizer.step()
