"""When a window closes and when pushes leave: accumulation, discarding, no_sync, closures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradsum.errors import UsageError
from gradsum.worker.client import Client
from gradsum.worker.optimizer import wrap
from tests.worker.models import (
    assert_equal,
    backward,
    both,
    data,
    net,
    one,
    sgd,
    train_with,
    weights,
)
from tests.worker.naive import NaiveCluster


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
