"""What the functions and the wrapped optimizer mean to user code."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradsum
from gradsum.errors import GradsumError, PeerLost, UsageError
from tests.e2e.models import (
    batch,
    mean_gradients,
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
from tests.e2e.stage import Stage, close, equal, scenario, until, within


def raises(kind: type[BaseException], work: Any, *words: str) -> None:
    """Fail unless ``work()`` raises an error of this kind that says all the words."""
    try:
        work()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in {error}"
        return
    raise AssertionError(f"no {kind.__name__}")


def equal_models(model: nn.Module, alone: nn.Module, atol: float = 0.0) -> None:
    for (name, a), (_, b) in zip(weights(model), weights(alone), strict=True):
        if atol:
            close(a, b, atol, name)
        else:
            equal(a, b, name)


@scenario()
def c05_schedulers_accept_the_wrapped_optimizer(stage: Stage) -> None:
    for before in (False, True):
        p = parameter(0.0)
        base = torch.optim.SGD([p], lr=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            early = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.1) if before else None
            optimizer = wrapped(base, ("p", p))
            scheduler = early or torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
            seen = []
            for _ in range(3):
                optimizer.zero_grad()
                push(p, stage.mine(1.0, 3.0))
                old = p.item()
                optimizer.step()
                seen.append((old - p.item()) / 2.0)
                scheduler.step()
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is scheduler.optimizer.param_groups
        close(seen, [1.0, 0.1, 0.01], what=f"scheduler made before: {before}")
        stage.same(p)


def _gan() -> nn.ModuleList:
    generator = nn.Sequential(nn.Linear(2, 3))
    return nn.ModuleList([generator, nn.Sequential(nn.Linear(3, 1))])


@scenario(services=("plain", "unpacked"))
def c08_two_optimizers_with_the_same_names(stage: Stage) -> None:
    both, alone = seeded(_gan), seeded(_gan)
    optimizers = [
        wrapped(torch.optim.SGD(m.parameters(), lr=0.1), *m.named_parameters()) for m in both
    ]
    plain = [torch.optim.SGD(m.parameters(), lr=0.1) for m in alone]

    def loss(models: nn.ModuleList, which: int, rank: int, step: int) -> torch.Tensor:
        g, d = models
        made = g(batch(rank, step, 3, 2))
        real = batch(rank, step + 50, 3, 3)
        result: torch.Tensor = (
            d(made.detach()).square().mean() + d(real).mean() if which else -d(made).mean()
        )
        return result

    for step, which in itertools.product(range(5), (1, 0)):
        optimizers[which].zero_grad()
        loss(both, which, stage.rank, step).backward()
        optimizers[which].step()
        if not which:
            optimizers[1].zero_grad()
        mean_gradients(alone[which].parameters(), 2, loss, alone, which, step=step)
        plain[which].step()
    equal_models(both, alone)
    stage.same(*both.parameters())


@scenario(services=("plain", "unpacked"))
def c25_discarded_gradients_never_reach_an_update(stage: Stage) -> None:
    for set_to_none in (True, False):
        both, alone = seeded(_gan), seeded(_gan)
        g, d = both
        opt_g, opt_d = (
            wrapped(torch.optim.SGD(m.parameters(), lr=0.1), *m.named_parameters()) for m in both
        )

        def d_loss(g: nn.Module, d: nn.Module, rank: int, step: int) -> torch.Tensor:
            result: torch.Tensor = d(g(batch(rank, step, 3, 2))).square().mean()
            return result

        def g_loss(g: nn.Module, d: nn.Module, rank: int, step: int) -> torch.Tensor:
            result: torch.Tensor = -d(g(batch(rank, step + 50, 3, 2))).mean()
            return result

        for step in range(4):
            with stage.stopped_servers(0.2 if step == 2 else 0.0):
                opt_d.zero_grad(set_to_none=set_to_none)
                d_loss(g, d, stage.rank, step).backward()
                opt_d.step()
                opt_g.zero_grad(set_to_none=set_to_none)
                g_loss(g, d, stage.rank, step).backward()
                opt_g.step()
            for which, loss in ((1, d_loss), (0, g_loss)):
                mean_gradients(alone[which].parameters(), 2, loss, *alone, step=step)
                torch.optim.SGD(alone[which].parameters(), lr=0.1).step()
        equal_models(both, alone, atol=1e-6)
        stage.same(*both.parameters())
        equal(len(set(stage.gather(opt_g.windows))), 1, "windows of G")


@scenario()
def c26_optimizer_state(stage: Stage) -> None:
    for wrap_first in (False, True):
        p, q = parameter(1.0, 2.0), parameter(3.0)
        lr = stage.mine(0.5, 0.1)
        optimizer: Any = torch.optim.Adam([p, q], lr=lr, weight_decay=stage.mine(0.1, 0.0))
        if stage.rank == 0:
            for grad in (1.0, -2.0, 0.25):
                p.grad, q.grad = torch.full((2,), grad), torch.full((1,), grad / 3)
                optimizer.step()
        if wrap_first:
            optimizer = wrapped(optimizer, ("p", p), ("q", q))
        before = [p.detach().clone(), q.detach().clone()]
        gradsum.broadcast_optimizer_state(optimizer, root_rank=0)
        equal([x.item() for x in (p[0], p[1], q[0])], [*before[0].tolist(), *before[1].tolist()])
        equal(optimizer.param_groups[0]["lr"], 0.5)
        equal(optimizer.param_groups[0]["weight_decay"], 0.1)
        for each in (p, q):
            equal(float(optimizer.state[each]["step"]), 3.0)
            stage.same(optimizer.state[each]["exp_avg"], optimizer.state[each]["exp_avg_sq"])
            assert optimizer.state[each]["exp_avg"].abs().sum() > 0
    stateless = torch.optim.SGD([parameter(1.0)], lr=stage.mine(0.5, 0.1))
    gradsum.broadcast_optimizer_state(stateless)
    equal((stateless.param_groups[0]["lr"], len(stateless.state)), (0.5, 0))
    number = nn.Parameter(torch.tensor([stage.mine(3, 4)]), requires_grad=False)
    mixed = torch.optim.SGD([parameter(1.0), number], lr=0.1, momentum=0.9)
    gradsum.broadcast_optimizer_state(mixed)
    gradsum.broadcast_parameters({"number": number, "flag": torch.tensor(stage.rank == 0)})
    equal(number.item(), 3)


@scenario()
def c28_uneven_batches(stage: Stage) -> None:
    w = parameter(0.0)
    optimizer = sgd(w)
    for step, grad in enumerate(stage.mine((1.0, 2.0, 6.0), (3.0, 4.0))):
        optimizer.zero_grad()
        push(w, grad)
        optimizer.step()
        close(w.item(), (-0.2, -0.5, -0.8)[step], what=f"step {step}")
    with within(10.0, "join"):
        last = gradsum.join()
    equal(last, 0)
    close(w.item(), -0.8)  # the divisor is the world size, also in step 3
    stage.same(w)
    raises(UsageError, lambda: gradsum.push_pull(torch.ones(1), name="x"), "joined")


@scenario(ranks=(3,))
def c28_three_ranks_join_one_after_the_other(stage: Stage) -> None:
    w = parameter(0.0)
    optimizer = sgd(w, lr=1.0)
    expected = 0.0
    for step in range(12):
        active = [r for r in range(3) if step < 4 * (r + 1)]
        expected -= sum(r + 1.0 for r in active) / 3
        if stage.rank in active:
            optimizer.zero_grad()
            push(w, stage.rank + 1.0)
            optimizer.step()
            close(w.item(), expected, 1e-5, f"step {step}")
    equal(gradsum.join(), 2)
    close(w.item(), expected, 1e-5)
    stage.same(w)


@scenario()
def c28_a_rank_that_left_is_named(stage: Stage) -> None:
    w = parameter(0.0)
    optimizer = sgd(w)
    for _ in range(2):
        optimizer.zero_grad()
        push(w, 1.0)
        optimizer.step()
    if stage.rank == 1:
        gradsum.shutdown()
        stage.meet()
        return
    push(w, 1.0)
    with within(10.0, "the error"):
        raises(PeerLost, optimizer.step, "1")
    stage.meet()


@scenario(services=("plain", "unpacked"))
def c29_accumulation_windows(stage: Stage) -> None:
    w = parameter(0.0)
    optimizer = sgd(w, lr=0.01, backward_passes_per_step=2)
    before = stage.pushes()
    scale = stage.mine(1.0, 10.0)
    seen = []
    for i in range(1, 6):
        push(w, i * scale)
        if i in (2, 4, 5):
            optimizer.step()
            optimizer.zero_grad()
            seen.append(w.item())
    close(seen, [-0.165, -0.55, -0.825])
    equal(stage.pushes() - before, 3, "pushes")
    stage.same(w)


@scenario()
def c40_unfrozen_and_added_parameters(stage: Stage) -> None:
    model, alone = seeded(mlp), seeded(mlp)
    backbone, head = model[0], model[2]
    backbone.requires_grad_(False)
    inner = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1)
    optimizer = wrapped(inner, *model.named_parameters())
    plain = torch.optim.SGD(alone[2].parameters(), lr=0.1)
    alone[0].requires_grad_(False)
    train(model, optimizer, square_loss, stage.rank, range(1))
    train_alone(alone, plain, square_loss, 2, range(1))
    for m, opt in ((model, optimizer), (alone, plain)):
        m[0].requires_grad_(True)
        opt.add_param_group({"params": list(m[0].parameters())})
    train(model, optimizer, square_loss, stage.rank, range(1, 6))
    train_alone(alone, plain, square_loss, 2, range(1, 6))
    equal_models(model, alone)
    backbone.requires_grad_(False)
    alone[0].requires_grad_(False)
    frozen = [p.detach().clone() for p in backbone.parameters()]
    with within(5.0, "two steps after freezing"):
        train(model, optimizer, square_loss, stage.rank, range(6, 8))
    train_alone(alone, plain, square_loss, 2, range(6, 8))
    equal_models(model, alone)
    for p, before in zip(backbone.parameters(), frozen, strict=True):
        equal(p.detach(), before)
    stage.same(*model.parameters(), *head.parameters())


@scenario()
def c50_activation_checkpointing_of_a_shared_layer(stage: Stage) -> None:
    def loss(layer: nn.Module, rank: int, step: int, reentrant: bool | None) -> torch.Tensor:
        x = batch(rank, step, 2, 3).requires_grad_()
        once = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        result: torch.Tensor = layer(once).sum()
        return result

    for reentrant in (None, True, False):
        layer, alone = (seeded(lambda: nn.Linear(3, 3)) for _ in range(2))
        optimizer = wrapped(torch.optim.SGD(layer.parameters(), lr=0.1), *layer.named_parameters())
        for step in range(5):
            optimizer.zero_grad()
            loss(layer, stage.rank, step, reentrant).backward()
            optimizer.synchronize()
            mean_gradients(alone.parameters(), 2, loss, alone, step=step, reentrant=None)
            for p, q in zip(layer.parameters(), alone.parameters(), strict=True):
                close(p.grad, q.grad, what=f"reentrant={reentrant}")
            optimizer.step()
            torch.optim.SGD(alone.parameters(), lr=0.1).step()
        stage.same(*layer.parameters())


@scenario()
def c53_hooks_fire_under_compile(stage: Stage) -> None:
    model, alone = seeded(mlp), seeded(mlp)
    compiled: Any = torch.compile(model, backend="eager")
    compiled(batch(stage.rank, 99))  # compiled before it is wrapped
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), *compiled.named_parameters())
    train(compiled, optimizer, square_loss, stage.rank, range(6))
    train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), square_loss, 2, range(6))
    equal_models(model, alone)
    stage.same(*model.parameters())


@scenario()
def c56_checkpoint_round_trip(stage: Stage) -> None:
    def fresh(seed: int) -> tuple[nn.Module, Any]:
        model = seeded(mlp, seed)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, wrapped(inner, *model.named_parameters())

    model, optimizer = fresh(0)
    train(model, optimizer, square_loss, stage.rank, range(2))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = f"{stage.folder}/checkpoint.{stage.rank}"
    torch.save(saved, file)
    train(model, optimizer, square_loss, stage.rank, range(2, 4))
    straight = [p.detach().clone() for p in model.parameters()]

    stage.again()
    other, optimizer = fresh(1 + stage.rank)
    if stage.rank == 0:
        loaded = torch.load(file, weights_only=True)
        other.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    gradsum.broadcast_parameters(other.state_dict())
    gradsum.broadcast_optimizer_state(optimizer)
    train(other, optimizer, square_loss, stage.rank, range(2, 4))
    for p, before in zip(other.parameters(), straight, strict=True):
        equal(p.detach(), before)
    stage.same(*other.parameters())
    alone = seeded(mlp, 5)
    plain = torch.optim.SGD(alone.parameters(), lr=0.7, momentum=0.1)
    loaded = torch.load(file, weights_only=True)
    alone.load_state_dict(loaded["model"])
    plain.load_state_dict(loaded["optimizer"])
    train_alone(alone, plain, square_loss, 2, range(2, 4))
    for p, before in zip(alone.parameters(), straight, strict=True):
        equal(p.detach(), before)


@scenario()
def c64_no_sync_around_backward_only(stage: Stage) -> None:
    w = parameter(0.0)
    optimizer = sgd(w, lr=1.0)
    for step in range(1, 5):
        before = stage.pushes()
        optimizer.zero_grad()
        for grad in (1.0, 2.0):
            loss = (w * (grad + stage.rank)).sum()
            with optimizer.no_sync():
                loss.backward()
        push(w, 4.0)
        optimizer.step()
        equal(w.item(), -8.0 * step)
        equal(stage.pushes() - before, 1, "pushes")
    try:
        with optimizer.no_sync():
            raise KeyError
    except KeyError:
        pass
    optimizer.zero_grad()
    with optimizer.no_sync():
        with optimizer.no_sync():
            push(w, 1.0)
        push(w, 1.0)
    until(
        lambda: stage.session.firings(optimizer._gradients.group) is not None,
        "what all ranks' window 1 taught",
    )
    before = stage.pushes()
    push(w, 6.0)  # syncs from the hook
    until(lambda: stage.pushes() > before, "the early push")
    optimizer.step()
    equal(w.item(), -40.0)
    stage.same(w)


@scenario()
def c68_replaced_parameters(stage: Stage) -> None:
    for how in ("model", "names"):
        model = seeded(mlp)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        named = None if how == "model" else list(model.named_parameters())
        optimizer = gradsum.DistributedOptimizer(inner, named, model=model)
        model.load_state_dict(seeded(mlp, 1).state_dict(), assign=True)
        model(batch(stage.rank, 0)).sum().backward()
        raises(GradsumError, optimizer.step, "0.weight", "replaced")
    model, alone = seeded(mlp), seeded(mlp)
    model.double().float()  # the same objects: not replaced
    optimizer = gradsum.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), model=model
    )
    train(model, optimizer, square_loss, stage.rank, range(4))
    train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), square_loss, 2, range(4))
    equal_models(model, alone)


@scenario()
def c95_step_with_a_closure(stage: Stage) -> None:
    w = parameter(1.0)
    optimizer = sgd(w)
    grad = stage.mine(2.0, 4.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (w * grad).sum()
        loss.backward()
        return loss.item()

    for step in range(4):
        before = w.item()
        close(optimizer.step(closure), before * grad)
        close(w.item(), 1 - 0.3 * (step + 1))
    stage.same(w)
    raises(TypeError, lambda: wrapped(torch.optim.LBFGS([parameter(1.0)], max_eval=5)), "LBFGS")


@scenario()
def c100_nothing_to_train(stage: Stage) -> None:
    model = seeded(mlp, stage.rank).requires_grad_(False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with within(5.0, "a frozen model"):
        gradsum.broadcast_parameters(model.state_dict())
        optimizer = wrapped(inner, *model.named_parameters())
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.step()
    equal(optimizer.state_dict()["state"], {})
    equal_models(model, seeded(mlp))


@scenario(services=("plain", "slices of 64"))
def tied_weights_are_one_parameter(stage: Stage) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.out = nn.Linear(4, 7, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.out(self.embed(x))
            return result

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        result: torch.Tensor = model(torch.tensor([step % 7, rank, 2 * rank + 1])).square().mean()
        return result

    model, alone = seeded(Tied), seeded(Tied)
    gradsum.broadcast_parameters(model.state_dict())
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), *model.named_parameters())
    train(model, optimizer, loss, stage.rank, range(8))
    train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), loss, 2, range(8))
    equal_models(model, alone)
    assert model.out.weight is model.embed.weight


@scenario()
def broadcasts_give_all_ranks_the_roots_bits(stage: Stage) -> None:
    for root in range(stage.size):
        model = seeded(mlp, 10 + stage.rank)
        gradsum.broadcast_parameters(model.state_dict(), root_rank=root, prefix=f"{root}.")
        equal_models(model, seeded(mlp, 10 + root))
        tensor = torch.arange(3.0)
        given = {"epoch": 3 + root, "names": ("a", b"\0"), "t": tensor, "big": 2**80, "r": root}
        got = gradsum.broadcast_object(given if stage.rank == root else None, root, name="state")
        equal(got["t"], tensor)
        equal({**got, "t": None}, {**given, "t": None})
    odd = torch.tensor([float("nan"), -0.0, 1e-45])
    odd.view(torch.int32)[0] += 77  # a NaN with a payload
    bits = odd.view(torch.int32).clone()
    held = odd if stage.rank == 0 else torch.zeros(3)
    gradsum.broadcast_parameters([("odd", held), ("flags", torch.tensor([True, False]))])
    equal(held.view(torch.int32), bits)
    if stage.rank == 0:
        raises(TypeError, lambda: gradsum.broadcast_object(OrderedDict(f=len)), "builtin")
    gradsum.barrier()


@scenario()
def lists_handles_and_in_place(stage: Stage) -> None:
    given = [torch.full((n,), stage.mine(1.0, 3.0) * n) for n in (1, 5, 70_000)]
    results = gradsum.push_pull(given, name="list")
    for n, result in zip((1, 5, 70_000), results, strict=True):
        equal(result, torch.full((n,), 2.0 * n))
    handle = gradsum.push_pull_async_inplace(given, average=False, name="again")
    results = gradsum.synchronize(handle)
    assert all(a is b for a, b in zip(results, given, strict=True))
    equal(given[2], torch.full((70_000,), 4.0 * 70_000))
    assert gradsum.poll(handle)
    assert gradsum.synchronize(handle)[0] is results[0]
    time, rate = gradsum.get_pushpull_speed()
    assert time > 0
    assert rate >= 0.0
