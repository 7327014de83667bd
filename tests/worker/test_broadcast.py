"""Broadcasts: parameters, optimizer state and values reach every rank bit for bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradsum.errors import MismatchError, UsageError
from gradsum.worker import broadcast
from gradsum.worker.client import Client
from gradsum.worker.optimizer import wrap
from tests.worker.naive import NaiveCluster

both = pytest.mark.parametrize("late", [False, True], ids=["soon", "late"])


def model_of(rank: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 1))
    with torch.no_grad():
        for i, tensor in enumerate(model.state_dict().values()):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 100 * i + 10_000 * rank)
    return model


@both
@pytest.mark.parametrize("root", [0, 1, 2])
def test_all_ranks_get_the_roots_tensors(late: bool, root: int) -> None:
    def work(client: Client) -> None:
        model = model_of(client.session.rank)
        pointers = [t.data_ptr() for t in model.state_dict().values()]
        broadcast.parameters(client, model.state_dict(), root)
        expected = model_of(root).state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
        assert pointers == [t.data_ptr() for t in model.state_dict().values()]
        for parameter in model.parameters():
            assert parameter.requires_grad and parameter.is_leaf and parameter.grad is None

    NaiveCluster(3, late=late).run(work)


@pytest.mark.parametrize("form", ["state_dict", "dict", "list", "iterator", "compiled"])
def test_forms_of_naming(form: str) -> None:
    def work(client: Client) -> None:
        rank = client.session.rank
        model = model_of(rank)
        pairs = list(model.named_parameters())
        if form == "compiled" and rank == 1:  # C44
            pairs = [(f"_orig_mod.{name}", p) for name, p in pairs]
        given: dict[str, Any] = {
            "state_dict": model.state_dict(),
            "dict": dict(pairs),
            "list": pairs,
            "iterator": model.named_parameters(),
            "compiled": pairs,
        }
        broadcast.parameters(client, given[form])
        assert torch.equal(model[0].weight, model_of(0)[0].weight)  # type: ignore[arg-type]

    NaiveCluster(2).run(work)


@both
def test_every_dtype_layout_and_nan(late: bool) -> None:
    def work(client: Client) -> None:
        rank = client.session.rank
        quiet = torch.tensor([0x7FC00001 + rank], dtype=torch.int32).view(torch.float32)
        named: dict[str, torch.Tensor] = {
            "nan": quiet,
            "mask": torch.tensor([rank == 0, False]),
            "count": torch.tensor(7 + rank),
            "half": torch.tensor([1.5 + rank]).bfloat16(),
            "complex": torch.tensor([1j + rank]),
            "strided": torch.full((2, 3), float(rank)).t(),
            "empty": torch.empty(0, 2),
            "zero": torch.tensor(-0.0 if rank == 0 else 1.0),
            "wide": torch.tensor([2**40 + rank], dtype=torch.uint64),
        }
        broadcast.parameters(client, named)
        assert quiet.view(torch.int32).item() == 0x7FC00001
        assert named["mask"].tolist() == [True, False] and named["count"].item() == 7
        assert named["half"].item() == 1.5 and named["complex"].tolist() == [1j]
        assert named["strided"].eq(0).all() and named["strided"].stride() == (1, 3)
        assert str(named["zero"].item()) == "-0.0" and named["wide"].item() == 2**40

    NaiveCluster(2, late=late).run(work)


def test_repeated_broadcasts_count_versions() -> None:
    def work(client: Client) -> None:
        for i in range(3):
            tensor = torch.tensor([float(i + 10 * client.session.rank)])
            broadcast.parameters(client, {"x": tensor}, root=1)
            assert tensor.item() == i + 10

    NaiveCluster(2).run(work)


def test_c08_two_models_with_the_same_names() -> None:
    def work(client: Client) -> None:
        rank = client.session.rank
        for size in (2, 3, 2, 4):
            tensor = torch.full((size,), float(size + rank))
            broadcast.parameters(client, {"0.weight": tensor})
            assert tensor.tolist() == [size] * size

    cluster = NaiveCluster(2)
    cluster.run(work)
    name = "broadcast/0/Parameter.0.weight"
    assert [spec.name for spec in cluster.table.since(0)] == [name, f"{name}#2", f"{name}#3"]


def test_shapes_that_differ_are_named() -> None:
    def work(client: Client) -> None:
        broadcast.parameters(client, {"w": torch.zeros(2 + client.session.rank)})

    with pytest.raises(MismatchError, match="broadcast/0/Parameter.w"):
        NaiveCluster(2).run(work)


def test_bad_arguments() -> None:
    def work(client: Client) -> None:
        with pytest.raises(TypeError, match=r"names and tensors"):
            broadcast.parameters(client, list(nn.Linear(1, 1).parameters()))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'a' twice"):
            broadcast.parameters(client, [("a", torch.zeros(1)), ("_orig_mod.a", torch.zeros(1))])
        with pytest.raises(TypeError, match=r"'lr' is a float.*broadcast_object"):
            broadcast.parameters(client, {"lr": 0.1})
        with pytest.raises(UsageError, match="root_rank=3, but ranks are 0 to 0"):
            broadcast.parameters(client, {}, root=3)

    NaiveCluster(1).run(work)


@both
@pytest.mark.parametrize("wrapped", [False, True])
def test_c26_optimizer_state(late: bool, wrapped: bool) -> None:
    def work(client: Client) -> dict[str, Any]:
        rank = client.session.rank
        model = model_of(rank)
        lr = torch.tensor(0.5) if rank == 0 else torch.tensor(0.1)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=0.1)
        if rank == 0:
            for _ in range(3):
                optimizer.zero_grad()
                for p in model.parameters():
                    p.grad = torch.ones_like(p) * p.detach().abs().sqrt()
                optimizer.step()
        if wrapped:
            optimizer = wrap(client, optimizer, model.named_parameters())
        before = [p.detach().clone() for p in model.parameters()]
        broadcast.optimizer_state(client, optimizer)
        for p, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, old)
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert type(optimizer.param_groups[0]["betas"]) is tuple
        for p in model.parameters():
            assert optimizer.state[p]["step"].item() == 3
        return optimizer.state_dict()  # type: ignore[no-any-return]

    left, right = NaiveCluster(2, late=late).run(work)
    for index, state in left["state"].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, right["state"][index][name]), (index, name)


def test_c26_stateless_optimizers_and_int_parameters() -> None:
    def work(client: Client) -> None:
        p = nn.Parameter(torch.ones(2))
        flags = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        optimizer = torch.optim.SGD([p, flags], lr=0.1 + client.session.rank)
        broadcast.optimizer_state(client, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert p.tolist() == [1, 1] and flags.tolist() == [1, 2]

    NaiveCluster(3).run(work)


def test_two_optimizers_with_states_of_other_shapes() -> None:
    def work(client: Client) -> None:
        for size in (2, 3, 2):
            p = nn.Parameter(torch.ones(size))
            optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
            if client.session.rank == 0:
                p.grad = torch.full((size,), float(size))
                optimizer.step()
            broadcast.optimizer_state(client, optimizer)
            assert optimizer.state[p]["momentum_buffer"].tolist() == [size] * size

    NaiveCluster(2).run(work)


def test_other_groups_than_the_root() -> None:
    def work(client: Client) -> None:
        parameters = [nn.Parameter(torch.ones(1)) for _ in range(1 + client.session.rank)]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        broadcast.optimizer_state(client, optimizer)

    with pytest.raises(
        MismatchError, match=r"groups have \[2\] parameters here, \[1\] on the root"
    ):
        NaiveCluster(2).run(work)


@both
def test_values_of_any_size(late: bool) -> None:
    def work(client: Client) -> None:
        rank = client.session.rank
        source = random.Random(0)
        for length in (0, 1, 5, 64, 65, 5000):
            value = {"epoch": 3, "words": "x" * length, "t": (1, [2.5]), "raw": source.randbytes(9)}
            got = broadcast.value(client, value if rank == 1 else None, root=1, name="v")
            assert got == value and type(got["t"]) is tuple
        got = broadcast.value(client, torch.ones(2) if rank == 0 else "ignored")
        assert got.tolist() == [1, 1]
        array = broadcast.value(client, np.eye(2) if rank == 0 else object())
        assert array.tolist() == [[1, 0], [0, 1]]

    NaiveCluster(2, late=late).run(work)


def test_a_value_that_cannot_travel_is_a_type_error() -> None:
    def work(client: Client) -> None:
        broadcast.value(client, {"f": print})

    with pytest.raises(TypeError, match=r"obj\['f'\]"):
        NaiveCluster(1).run(work)
