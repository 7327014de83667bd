"""DistributedOptimizer over several ranks, each with other data, against plain torch."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from gradsum.errors import NonFinite, NotBuilt, UsageError
from gradsum.worker.client import Client
from gradsum.worker.compression import Compression
from gradsum.worker.optimizer import Distributed, wrap
from tests.worker.naive import NaiveCluster, settled

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


@both
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("with_model", [False, True])
def test_training_equals_a_single_process(late: bool, ranks: int, with_model: bool) -> None:
    def work(client: Client) -> list[torch.Tensor]:
        model = net()
        inner = torch.optim.Adam(model.parameters(), lr=0.01)
        how: dict[str, Any] = {"model": model} if with_model else {}
        optimizer = wrap(client, inner, model.named_parameters(), **how)
        assert optimizer is inner
        for step in range(5):
            optimizer.zero_grad()
            model(data(client.session.rank, step)).square().sum().backward()
            optimizer.step()
        assert settled(client)
        return weights(model)

    cluster = NaiveCluster(ranks, late=late)
    results = cluster.run(work)
    for other in results[1:]:
        assert_equal(results[0], other)
    alone = single(
        ranks, 5, lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        lambda m, x: m(x).square().sum(),
    )  # fmt: skip
    assert_close(results[0], weights(alone))
    assert cluster.pushes == {f"opt0/{n}": 5 * ranks for n, _ in net().named_parameters()}


def test_pushes_start_during_backward_from_window_two_on() -> None:
    def work(client: Client) -> list[int]:
        model = net()
        optimizer = train_with(client, model)
        before_step = []
        for step in range(3):
            optimizer.zero_grad()
            model(data(client.session.rank, step)).sum().backward()
            before_step.append(len(client.session.handles) - 4 * step)  # type: ignore[attr-defined]
            optimizer.step()
            client.session.barrier()
        return before_step

    assert NaiveCluster(2).run(work) == [[0, 4, 4]] * 2


@both
def test_c01_bfloat16_model(late: bool) -> None:
    def work(client: Client) -> list[torch.Tensor]:
        model = seeded(lambda: nn.Linear(2, 2)).bfloat16()
        before = weights(model)
        optimizer = train_with(client, model, 0.5)
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.5 + client.session.rank)
        optimizer.step()
        for p, old in zip(model.parameters(), before, strict=True):
            assert p.grad is not None and p.grad.dtype == torch.bfloat16
            assert (p.grad == 2.0).all() and torch.equal(p.detach(), old - 1)
        return weights(model)

    left, right = NaiveCluster(2, late=late).run(work)
    assert_equal(left, right)


def amp_steps(
    client: Client, first: tuple[float, float], explicit: bool
) -> tuple[float, float, float]:
    """Step 1 with unscaled gradients ``first`` per rank, step 2 with 2.0 and 4.0."""
    rank = client.session.rank
    p = one(1.0)
    optimizer = sgd(client, ("p", p))
    scaler = torch.amp.GradScaler("cpu", init_scale=4)
    after = []
    for grad in (first[rank], (2.0, 4.0)[rank]):
        optimizer.zero_grad()
        scaler.scale((p * grad).sum()).backward()
        if explicit:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        after.append(p.item())
        if len(after) == 1:
            scale = scaler.get_scale()
    return after[0], scale, after[1]


@both
@pytest.mark.parametrize("explicit", [False, True])
def test_c02_ranks_agree_about_skipping(late: bool, explicit: bool) -> None:
    for p1, scale, p2 in NaiveCluster(2, late=late).run(
        lambda client: amp_steps(client, (2.0, float("inf")), explicit)
    ):
        assert (p1, scale) == (1.0, 2.0) and p2 == pytest.approx(0.7)


@both
def test_c41_a_skipped_step_leaves_nothing_in_flight(late: bool) -> None:
    def work(client: Client) -> tuple[float, float, float]:
        result = amp_steps(client, (float("inf"), float("inf")), explicit=False)
        assert settled(client)
        return result

    cluster = NaiveCluster(2, late=late)
    for p1, _, p2 in cluster.run(work):
        assert p1 == 1.0 and p2 == pytest.approx(0.7)
    assert len(cluster.complete) == 2


@pytest.mark.parametrize("before", [False, True], ids=["after wrapping", "before wrapping"])
def test_c05_schedulers_and_isinstance(before: bool) -> None:
    def work(client: Client) -> list[float]:
        p = one()
        inner = torch.optim.SGD([p], lr=1.0)
        groups = inner.param_groups
        schedule = StepLR(inner, 1, gamma=0.1) if before else None
        optimizer = wrap(client, inner, [("p", p)])
        schedule = schedule or StepLR(optimizer, 1, gamma=0.1)
        assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(
            optimizer, torch.optim.SGD
        )
        assert optimizer.param_groups is groups and type(optimizer).__name__ == "SGD"
        moves = []
        for _ in range(3):
            optimizer.zero_grad()
            old = p.item()
            backward(p, 2.0 * client.session.rank)
            optimizer.step()
            schedule.step()
            moves.append(old - p.item())
        return moves

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for moves in NaiveCluster(2).run(work):
            assert moves == pytest.approx([1.0, 0.1, 0.01], abs=1e-6)


def test_c08_two_optimizers_with_the_same_names() -> None:
    def gan(ranks: int, rank: int, client: Client | None) -> list[torch.Tensor]:
        g = seeded(lambda: nn.Sequential(nn.Linear(2, 3)))
        d = seeded(lambda: nn.Sequential(nn.Linear(3, 1)))
        opt_g: Any = torch.optim.SGD(g.parameters(), lr=0.1)
        opt_d: Any = torch.optim.SGD(d.parameters(), lr=0.1)
        if client is not None:
            opt_g = wrap(client, opt_g, g.named_parameters())
            opt_d = wrap(client, opt_d, d.named_parameters())
        everyone = [rank] if client is not None else range(ranks)
        for step in range(5):
            noise = {r: data(r, step)[:, :2] for r in everyone}
            opt_d.zero_grad()
            for r in everyone:  # not detached: reaches the generator too (C25)
                (d(g(noise[r])).square().sum() / len(everyone)).backward()
            opt_d.step()
            opt_g.zero_grad(set_to_none=step % 2 == 0)
            for r in everyone:
                (-d(g(noise[r])).sum() / len(everyone)).backward()
            opt_g.step()
        return weights(g) + weights(d)

    for late in (False, True):
        results = NaiveCluster(2, late=late).run(lambda c: gan(2, c.session.rank, c))
        assert_equal(results[0], results[1])
        assert_close(results[0], gan(2, 0, None))


@both
@pytest.mark.parametrize("set_to_none", [True, False])
def test_c25_discarded_gradients_never_reach_an_update(late: bool, set_to_none: bool) -> None:
    def work(client: Client) -> float:
        rank, p = client.session.rank, one()
        optimizer = sgd(client, ("p", p), lr=1.0)
        for step in range(3):
            backward(p, 1000.0 * (rank + 1))
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(p, 2.0 * rank)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert p.item() == -(step + 1)
        return p.item()

    assert NaiveCluster(2, late=late).run(work) == [-3.0, -3.0]


@both
def test_c22_unused_parameters_do_not_move(late: bool) -> None:
    def decay(client: Client) -> None:
        p, q = one(1.0), one(1.0)
        optimizer = sgd(client, ("p", p), ("q", q), weight_decay=0.1)
        backward(q, 1.0)
        optimizer.step()
        assert p.item() == 1.0 and p.grad is None

    def adam(client: Client) -> None:
        p = one(1.0)
        optimizer = wrap(client, torch.optim.Adam([p], lr=0.1), [("p", p)])
        backward(p, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        assert p.item() == pytest.approx(0.9) and p.grad is None

    NaiveCluster(2, late=late).run(decay)
    NaiveCluster(2, late=late).run(adam)


@both
def test_v5_a_parameter_used_on_one_rank_is_divided_by_all(late: bool) -> None:
    def work(client: Client) -> None:
        p, q = one(), nn.Parameter(torch.zeros(2, 3).t())
        optimizer = sgd(client, ("p", p), ("q", q), lr=1.0)
        for step in range(1, 4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            backward(p, 1.0)
            if client.session.rank == step % 3:
                (q * torch.arange(6.0).view(3, 2)).sum().backward()
            optimizer.step()
            assert p.item() == -step
            assert torch.allclose(q, -step * torch.arange(6.0).view(3, 2) / 3)
            assert q.grad is not None and q.grad.stride() == q.stride()

    NaiveCluster(3, late=late).run(work)


@both
def test_c29_accumulation_windows(late: bool) -> None:
    def work(client: Client) -> list[float]:
        p = one()
        optimizer = sgd(client, ("p", p), lr=0.01, backward_passes_per_step=2)
        scale = 10.0 if client.session.rank else 1.0
        seen = []
        for i in range(1, 6):
            backward(p, i * scale)
            if i in (2, 4, 5):
                optimizer.step()
                optimizer.zero_grad()
                seen.append(p.item())
        return seen

    cluster = NaiveCluster(2, late=late)
    for seen in cluster.run(work):
        assert seen == pytest.approx([-0.165, -0.55, -0.825])
    assert cluster.pushes == {"opt0/p": 6}


def test_v4_an_extra_backward_raises_before_accumulation() -> None:
    def work(client: Client) -> None:
        p = one()
        optimizer = sgd(client, ("p", p), lr=1.0)
        backward(p, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        client.session.barrier()
        backward(p, 1.0)
        assert p.grad is not None
        with pytest.raises(UsageError, match=r"(?s)opt0/p.*backward_passes_per_step"):
            backward(p, 1.0)
        assert p.grad.item() == 1.0
        optimizer.step()
        assert p.item() == -2.0
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(2)
        for _ in range(2):
            backward(p, 1.0)
            backward(p, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert p.item() == -6.0

    NaiveCluster(2).run(work)


def test_v4_changing_a_gradient_under_way_is_an_error() -> None:
    def work(client: Client) -> None:
        p = one()
        optimizer = sgd(client, ("p", p))
        backward(p, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        client.session.barrier()
        backward(p, 1.0)
        nn.utils.clip_grad_norm_([p], 0.1)
        with pytest.raises(UsageError, match=r"(?s)opt0/p.*synchronize\(\)"):
            optimizer.step()

    NaiveCluster(2).run(work)


@both
def test_clipping_after_synchronize(late: bool) -> None:
    def work(client: Client) -> None:
        p = one()
        optimizer = sgd(client, ("p", p), lr=1.0)
        for step in range(1, 4):
            optimizer.zero_grad()
            backward(p, 4.0 * client.session.rank)
            optimizer.synchronize()
            assert p.grad is not None and p.grad.item() == 2.0
            nn.utils.clip_grad_norm_([p], 1.0)
            if step == 2:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            assert p.item() == pytest.approx(-step, abs=1e-5)
        backward(p, 1.0)
        with pytest.raises(UsageError, match="skip_synchronize"), optimizer.skip_synchronize():
            optimizer.step()
        optimizer.step()

    cluster = NaiveCluster(2, late=late)
    cluster.run(work)
    assert cluster.pushes == {"opt0/p": 8}


@both
def test_c40_unfrozen_and_added_parameters(late: bool) -> None:
    def model_and_groups() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = net()
        model[0].requires_grad_(False)
        return model, torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1)

    def train(ranks: list[int], client: Client | None) -> list[torch.Tensor]:
        model, optimizer = model_and_groups()
        if client is not None:
            optimizer = wrap(client, optimizer, model.named_parameters())
        for step in range(5):
            if step == 1:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
            if step == 4:
                model[0].requires_grad_(False)
            optimizer.zero_grad()
            for rank in ranks:
                (model(data(rank, step)).square().sum() / len(ranks)).backward()
            optimizer.step()
        return weights(model)

    results = NaiveCluster(2, late=late).run(lambda c: train([c.session.rank], c))
    assert_equal(results[0], results[1])
    assert_close(results[0], train([0, 1], None))


def test_parameters_frozen_at_wrap_time_are_hooked_when_they_thaw() -> None:
    def work(client: Client) -> None:
        p, q = one(), one()
        q.requires_grad_(False)
        optimizer = sgd(client, ("p", p), ("q", q), lr=1.0)
        for step in range(4):
            q.requires_grad_(step >= 1)
            optimizer.zero_grad()
            backward(p + q, 2.0 * client.session.rank)
            optimizer.step()
        assert (p.item(), q.item()) == (-4.0, -3.0)

    NaiveCluster(2).run(work)


def test_c44_compiled_names_are_plain_names() -> None:
    def work(client: Client) -> None:
        p = one()
        name = "_orig_mod.fc.p" if client.session.rank else "fc.p"
        optimizer = sgd(client, (name, p), lr=1.0)
        backward(p, 2.0 * client.session.rank)
        optimizer.step()
        assert p.item() == -1.0

    NaiveCluster(2).run(work)


@both
def test_c49_complex_parameters(late: bool) -> None:
    def work(client: Client) -> None:
        p = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
        optimizer = sgd(client, ("p", p), compression=Compression.fp16)
        p.grad = torch.tensor([[1 + 2j, 3 - 4j][client.session.rank]])
        optimizer.step()
        assert p.grad.tolist() == [2 - 1j]

    NaiveCluster(2, late=late).run(work)


@both
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_c50_activation_checkpointing_of_a_shared_layer(late: bool, reentrant: bool | None) -> None:
    def inputs(rank: int, step: int) -> torch.Tensor:
        return data(rank, step)[:, :3].clone().requires_grad_()

    def loss(layer: nn.Module, x: torch.Tensor, how: bool | None) -> torch.Tensor:
        inner = layer(x) if how is None else checkpoint(layer, x, use_reentrant=how)
        return layer(inner).sum()  # type: ignore[no-any-return]

    def work(client: Client) -> list[torch.Tensor]:
        layer = seeded(lambda: nn.Linear(3, 3))
        optimizer = train_with(client, layer, 0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss(layer, inputs(client.session.rank, step), reentrant).backward()
            optimizer.step()
            client.session.barrier()
        return weights(layer)

    cluster = NaiveCluster(2, late=late)
    results = cluster.run(work)
    layer = seeded(lambda: nn.Linear(3, 3))
    plain = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        plain.zero_grad()
        for rank in range(2):
            (loss(layer, inputs(rank, step), None) / 2).backward()
        plain.step()
    assert_equal(results[0], results[1])
    assert_close(results[0], weights(layer))
    assert cluster.pushes == {"opt0/weight": 6, "opt0/bias": 6}


def test_c56_checkpoint_round_trip() -> None:
    def steps(client: Client, model: nn.Module, optimizer: Distributed, some: range) -> None:
        for step in some:
            optimizer.zero_grad()
            model(data(client.session.rank, step)).square().sum().backward()
            optimizer.step()

    def fresh(client: Client) -> tuple[nn.Module, Distributed]:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, wrap(client, inner, model.named_parameters())

    def straight(client: Client) -> list[torch.Tensor]:
        model, optimizer = fresh(client)
        steps(client, model, optimizer, range(4))
        return weights(model)

    def first_half(client: Client) -> bytes:
        model, optimizer = fresh(client)
        steps(client, model, optimizer, range(2))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, file)
        return file.getvalue()

    def second_half(client: Client) -> list[torch.Tensor]:
        model, optimizer = fresh(client)
        saved = torch.load(io.BytesIO(file), weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["opt"])
        steps(client, model, optimizer, range(2, 4))
        return weights(model)

    whole = NaiveCluster(2).run(straight)
    file = NaiveCluster(2).run(first_half)[0]
    for half in NaiveCluster(2).run(second_half):
        assert_equal(half, whole[0])
    plain = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9)
    plain.load_state_dict(torch.load(io.BytesIO(file), weights_only=True)["opt"])
    assert len(plain.state) == 4


@both
def test_c64_no_sync(late: bool) -> None:
    def work(client: Client) -> None:
        p = one()
        optimizer = sgd(client, ("p", p), lr=1.0)
        for step in range(1, 4):
            optimizer.zero_grad()
            with optimizer.no_sync():
                backward(p, 1.0)
                with optimizer.no_sync():
                    pass
                backward(p, 2.0)
            backward(p, 6.0 * client.session.rank)
            optimizer.step()
            assert p.item() == -6.0 * step
            client.session.barrier()
        with pytest.raises(KeyError), optimizer.no_sync():
            raise KeyError
        optimizer.zero_grad()
        backward(p, 2.0)
        assert len(client.session.handles) == 4  # type: ignore[attr-defined]
        optimizer.step()

    cluster = NaiveCluster(2, late=late)
    cluster.run(work)
    assert cluster.pushes == {"opt0/p": 8}


def test_c68_replaced_parameters_are_named() -> None:
    def work(client: Client) -> None:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = wrap(client, inner, model.named_parameters(), model=model)
        state = {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model(data(0, 0)).sum().backward()
        with pytest.raises(UsageError, match=r"4 parameters were replaced.*: 0\.weight"):
            optimizer.step()

    NaiveCluster(2).run(work)


def test_c68_a_parameter_in_anothers_place_is_picked_up() -> None:
    def work(client: Client) -> None:
        p = one()
        optimizer = wrap(client, torch.optim.SGD([p], lr=1.0))
        backward(p, 1.0)
        optimizer.step()
        q = one()
        optimizer.param_groups[0]["params"][0] = q
        for _ in range(3):
            optimizer.zero_grad()
            backward(q, 2.0 * client.session.rank)
            optimizer.step()
        assert q.item() == -3.0

    NaiveCluster(2).run(work)


@both
def test_c71_gradients_in_other_layouts(late: bool) -> None:
    def work(client: Client) -> None:
        conv: Any = nn.Conv2d(4, 4, 3, bias=False)
        if client.session.rank == 0:
            conv = conv.to(memory_format=torch.channels_last)
        optimizer = train_with(client, conv, 0.1)
        conv.weight.grad = torch.zeros_like(conv.weight)
        optimizer.zero_grad(set_to_none=False)
        conv.weight.grad.copy_(torch.arange(144.0).view(4, 4, 3, 3))
        strides = conv.weight.grad.stride()
        optimizer.step()
        assert torch.equal(conv.weight.grad, torch.arange(144.0).view(4, 4, 3, 3))
        assert conv.weight.grad.stride() == strides
        assert (strides == (36, 1, 12, 4)) == (client.session.rank == 0)

    cluster = NaiveCluster(2, late=late)
    cluster.run(work)
    assert cluster.pushes == {"opt0/weight": 2}


def test_c79_parameters_without_elements() -> None:
    def work(client: Client) -> None:
        body, head = nn.Linear(4, 4), nn.Linear(4, 0)
        named = [(f"b.{n}", p) for n, p in body.named_parameters()]
        named += [(f"h.{n}", p) for n, p in head.named_parameters()]
        optimizer = sgd(client, *named)
        for step in range(3):
            optimizer.zero_grad()
            x = body(data(client.session.rank, step))
            torch.cat([x, head(x)], dim=1).sum().backward()
            optimizer.step()
            client.session.barrier()
        assert head.weight.grad is not None and head.weight.grad.shape == (0, 4)
        assert body.bias.grad is not None and body.bias.grad.tolist() == [3.0] * 4

    NaiveCluster(2).run(work)


@both
def test_c95_step_with_a_closure(late: bool) -> None:
    def work(client: Client) -> None:
        p = one(1.0)
        optimizer = sgd(client, ("p", p))
        grad = 2.0 + 2.0 * client.session.rank

        def closure() -> float:
            optimizer.zero_grad()
            loss = (p * grad).sum()
            loss.backward()
            return loss.item()

        for step in range(3):
            before = p.item()
            assert optimizer.step(closure) == pytest.approx(before * grad)
            assert p.item() == pytest.approx(1 - 0.3 * (step + 1), abs=1e-6)

    NaiveCluster(2, late=late).run(work)
    with pytest.raises(TypeError, match="LBFGS"):
        NaiveCluster(1).run(lambda c: wrap(c, torch.optim.LBFGS([one()])))


def test_c100_nothing_to_train() -> None:
    def work(client: Client) -> None:
        model = net().requires_grad_(False)
        optimizer = train_with(client, model, 0.1)
        before = weights(model)
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.step()
        assert_equal(before, weights(model))
        assert optimizer.state_dict()["state"] == {}

    NaiveCluster(2).run(work)


def test_an_int_parameter_takes_no_part() -> None:
    def work(client: Client) -> None:
        p = one()
        flags = nn.Parameter(torch.tensor([True]), requires_grad=False)
        count = nn.Parameter(torch.tensor([3]), requires_grad=False)
        optimizer = sgd(client, ("p", p), ("flags", flags), ("count", count), lr=1.0)
        backward(p, 1.0)
        optimizer.step()
        assert p.item() == -1.0

    NaiveCluster(2).run(work)


def test_tied_weights_are_one_tensor() -> None:
    def work(client: Client) -> None:
        a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        b.weight = a.weight
        model = nn.Sequential(a, b)
        nn.init.ones_(a.weight)
        named = list(model.named_parameters(remove_duplicate=False))
        assert len(named) == 2
        optimizer = wrap(client, torch.optim.SGD(model.parameters(), lr=0.1), named)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 2), float(client.session.rank))).sum().backward()
            optimizer.step()

    cluster = NaiveCluster(2)
    cluster.run(work)
    assert cluster.pushes == {"opt0/0.weight": 6}


def test_sparse_gradients_travel_dense_with_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    def work(client: Client) -> None:
        table = nn.Embedding(5, 2, sparse=True)
        nn.init.zeros_(table.weight)
        optimizer = train_with(client, table, 1.0)
        for step in range(1, 4):
            optimizer.zero_grad()
            rows = torch.tensor([[1, 1, 3], [3]][client.session.rank])
            table(rows).sum().backward()
            optimizer.step()
            assert table.weight.tolist() == [[v * -step] * 2 for v in (0, 1, 0, 1, 0)]

    logger = logging.getLogger("gradsum")
    logger.propagate = True
    with caplog.at_level(logging.WARNING, logger="gradsum"):
        NaiveCluster(2).run(work)
    assert len([r for r in caplog.records if "travels dense" in r.message]) == 2  # one per rank


@pytest.mark.parametrize("early", [False, True])
def test_the_nan_guard_names_rank_and_tensor(early: bool) -> None:
    def work(client: Client) -> None:
        p = one()
        optimizer = sgd(client, ("p", p))
        if early:
            backward(p, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            client.session.barrier()
        with pytest.raises(NonFinite, match=f"'opt0/p' on rank {client.session.rank} has 1 "):
            backward(p, float("nan"))
            optimizer.step()
        optimizer.zero_grad()
        backward(p, 1.0)
        optimizer.step()

    NaiveCluster(2, nan_guard=True).run(work)


def test_an_exception_in_backward_does_not_change_the_count() -> None:
    def work(client: Client) -> None:
        p, q = one(), one()
        optimizer = sgd(client, ("p", p), ("q", q), lr=1.0)
        backward(p + q, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        client.session.barrier()
        if client.session.rank == 0:
            backward(p, 50.0)  # then the batch turns out to be bad
            optimizer.zero_grad()
        else:
            backward(p + q, 4.0)
            optimizer.step()
            optimizer.zero_grad()
        backward(p + q, 2.0)
        optimizer.step()
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 1.0

    cluster = NaiveCluster(2)
    cluster.run(work)
    assert {version for _, version in cluster.complete} == {1, 2, 3}


def test_priorities_follow_the_forward_order_or_the_reverse_of_the_ready_order() -> None:
    def order(with_model: bool) -> list[str]:
        def work(client: Client) -> None:
            model = net()
            named = list(reversed(list(model.named_parameters())))
            how: dict[str, Any] = {"model": model} if with_model else {}
            optimizer = wrap(client, torch.optim.SGD(model.parameters(), lr=0.1), named, **how)
            for step in range(2):
                optimizer.zero_grad()
                model(data(0, step)).sum().backward()
                optimizer.step()
            assert not any(m._forward_pre_hooks for m in model.modules())

        cluster = NaiveCluster(1)
        cluster.run(work)
        second = [(urgency, name) for _, name, version, urgency in cluster.handed if version == 2]
        return [name for _, name in sorted(second)]

    assert order(True)[0].startswith("opt0/0.") and order(True)[-1].startswith("opt0/2.")
    assert order(False)[0].startswith("opt0/0.") and order(False)[-1].startswith("opt0/2.")


def test_packing_group_and_first_version_are_in_the_table() -> None:
    def work(client: Client) -> None:
        p, q = one(), one()
        optimizer = wrap(client, torch.optim.SGD([p], lr=0.1))
        optimizer.step()
        optimizer.add_param_group({"params": [q]})
        optimizer.step()

    cluster = NaiveCluster(2)
    cluster.run(work)
    p, q = cluster.table.since(0)
    assert (p.name, p.policy.pack, p.first) == ("opt0/group0.0", "opt0", 1)
    assert (q.name, q.policy.pack, q.first) == ("opt0/group1.0", "opt0", 2)


def test_what_cannot_be_wrapped() -> None:
    def work(client: Client) -> None:
        p, q = one(), one()
        inner = torch.optim.SGD([p, q], lr=0.1)
        with pytest.raises(UsageError, match=r"1 parameters .* no name: group0\.1"):
            wrap(client, inner, [("p", p)])
        with pytest.raises(ValueError, match="'p' twice"):
            wrap(client, inner, [("p", p), ("p", q)])
        with pytest.raises(TypeError, match=r"model\.named_parameters\(\)"):
            wrap(client, inner, [p, q])  # type: ignore[list-item]
        with pytest.raises(NotBuilt, match="cross_barrier"):
            wrap(client, inner, cross_barrier=True)
        with pytest.raises(ValueError, match="backward_passes_per_step=0"):
            wrap(client, inner, backward_passes_per_step=0)
        with pytest.raises(TypeError, match=r"not a torch\.optim\.Optimizer"):
            wrap(client, object())  # type: ignore[arg-type]
        wrap(client, inner)
        with pytest.raises(UsageError, match="wrapped already"):
            wrap(client, inner)

    NaiveCluster(1).run(work)


def test_copies_and_pickles_are_plain_optimizers() -> None:
    def work(client: Client) -> None:
        p = one()
        optimizer = sgd(client, ("p", p), momentum=0.9)
        for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(twin) is torch.optim.SGD
            twin.step()

    NaiveCluster(1).run(work)


def test_step_hooks_run_once_and_see_the_mean() -> None:
    def work(client: Client) -> None:
        p, seen = one(), []
        optimizer = sgd(client, ("p", p))
        optimizer.register_step_pre_hook(lambda *_: seen.append(p.grad.item() if p.grad else None))
        optimizer.load_state_dict(optimizer.state_dict())
        for _ in range(2):
            optimizer.zero_grad()
            backward(p, 2.0 * client.session.rank)
            optimizer.step()
        assert seen == [1.0, 1.0]
        assert client.session.steps == 2  # type: ignore[attr-defined]

    NaiveCluster(2).run(work)
