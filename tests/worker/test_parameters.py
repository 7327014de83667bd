"""Which parameters take part: frozen, thawed, added, replaced, tied, empty, renamed ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradsum.errors import UsageError
from gradsum.worker.client import Client
from gradsum.worker.optimizer import wrap
from tests.worker.models import (
    assert_close,
    assert_equal,
    backward,
    both,
    data,
    net,
    one,
    sgd,
    weights,
)
from tests.worker.naive import NaiveCluster


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
