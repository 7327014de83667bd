"""What each rank's gradients become: dtypes, absent ones, scaled ones, changing parameters."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradsum.errors import NonFinite
from gradsum.worker.client import Client
from gradsum.worker.compression import Compression
from gradsum.worker.optimizer import wrap
from tests.worker.models import (
    assert_close,
    assert_equal,
    backward,
    both,
    data,
    one,
    seeded,
    sgd,
    train_with,
    weights,
)
from tests.worker.naive import NaiveCluster, settled


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


def test_sparse_gradients_travel_dense_with_one_notice() -> None:
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

    notices: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = notices.append  # type: ignore[method-assign, assignment]
    logger = logging.getLogger("gradsum.worker")
    logger.addHandler(handler)
    try:
        NaiveCluster(2).run(work)
    finally:
        logger.removeHandler(handler)
    assert len([r for r in notices if "travels dense" in r.getMessage()]) == 2  # one per rank


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


def test_a_fused_optimizer_with_a_scaler_steps_on_the_mean() -> None:
    def work(client: Client) -> tuple[float, float]:
        p = one(1.0)
        optimizer = wrap(client, torch.optim.SGD([p], lr=0.1, fused=True), [("p", p)])
        scaler = torch.amp.GradScaler("cpu", init_scale=4)
        seen = []
        for grad in ((2.0, float("inf"))[client.session.rank], (2.0, 4.0)[client.session.rank]):
            optimizer.zero_grad()
            scaler.scale((p * grad).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(p.item())
        return seen[0], seen[1]

    for first, second in NaiveCluster(2).run(work):
        assert first == 1.0 and second == pytest.approx(0.7)


@both
@pytest.mark.parametrize("to_none", [False, True])
def test_shared_gradients_live_in_shared_memory_and_train_alike(late: bool, to_none: bool) -> None:
    def run(share: bool) -> list[list[torch.Tensor]]:
        def work(client: Client) -> list[torch.Tensor]:
            session: Any = client.session
            session.sharing, session.pack_bytes = True, 16
            model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
            optimizer = train_with(client, model, 0.1)
            for step in range(4):
                optimizer.zero_grad(set_to_none=to_none)
                model(data(client.session.rank, step)).square().mean().backward()
                optimizer.step()
                memories = {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
                taken = {torch.frombuffer(b, dtype=torch.uint8).data_ptr() for b in session.taken}
                large = [p for p in model.parameters() if p.numel() * 4 >= 16]
                assert len(memories & taken) == (len(large) if share else 0)
                assert len(session.taken) == (len(large) if share else 0)  # none anew
            return weights(model)

        return NaiveCluster(2, late=late, share_gradients=share).run(work)

    plain, shared = run(False), run(True)
    for left, right in zip([*plain, shared[0]], [*shared, shared[1]], strict=True):
        assert_equal(left, right)
