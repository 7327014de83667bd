"""DistributedOptimizer as an optimizer: schedulers, checkpoints, names, order, refusals."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from gradsum.errors import UsageError
from gradsum.worker.client import Client
from gradsum.worker.optimizer import Distributed, wrap
from tests.worker.models import (
    assert_close,
    assert_equal,
    backward,
    both,
    data,
    net,
    one,
    seeded,
    sgd,
    single,
    weights,
)
from tests.worker.naive import NaiveCluster, settled


@both
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("with_model", [False, True])
def test_training_equals_a_single_process(late: bool, ranks: int, with_model: bool) -> None:
    def work(client: Client) -> list[torch.Tensor]:
        model = net()
        inner = torch.optim.Adam(model.parameters(), lr=0.01)
        how: dict[str, Any] = {"model": model} if with_model else {}
        optimizer = wrap(client, inner, model.named_parameters(), **how)
        assert id(optimizer) == id(inner)
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


@pytest.mark.parametrize("before", [False, True], ids=["after wrapping", "before wrapping"])
def test_c05_schedulers_and_isinstance(before: bool) -> None:
    def work(client: Client) -> list[float]:
        p = one()
        inner = torch.optim.SGD([p], lr=1.0)
        groups = inner.param_groups
        schedule = StepLR(inner, 1, gamma=0.1) if before else None
        optimizer = wrap(client, inner, [("p", p)])
        schedule = schedule or StepLR(optimizer, 1, gamma=0.1)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert isinstance(optimizer, torch.optim.SGD)
        assert optimizer.param_groups is groups
        assert type(optimizer).__name__ == "SGD"
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
