"""join for uneven batch counts, and the check that all ranks hold the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradsum.errors import MismatchError
from gradsum.worker import agreement, broadcast
from gradsum.worker.client import Client
from gradsum.worker.optimizer import wrap
from tests.worker.naive import NaiveCluster, NaiveSession


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("explicit", [False, True])
def test_c28_uneven_batches(late: bool, explicit: bool) -> None:
    def work(client: Client) -> tuple[int, float, float]:
        w = nn.Parameter(torch.tensor([0.0]))
        optimizer = wrap(client, torch.optim.SGD([w], lr=0.1), [("w", w)])
        grads = [[1.0, 2.0, 6.0], [3.0, 4.0]][client.session.rank]
        seen = []
        for grad in grads:
            optimizer.zero_grad()
            (w * grad).sum().backward()
            optimizer.step()
            seen.append(w.item())
        last = agreement.join(client, ({"w": w},) if explicit else ())
        return last, seen[1], w.item()

    for last, second, final in NaiveCluster(2, late=late).run(work):
        assert last == 0
        assert second == pytest.approx(-0.5) and final == pytest.approx(-0.8)


def test_join_takes_modules_and_closes_open_windows() -> None:
    def work(client: Client) -> None:
        model = nn.Linear(2, 1)
        broadcast.parameters(client, model.state_dict())
        optimizer = wrap(client, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.full((1, 2), float(client.session.rank))).sum().backward()
        agreement.join(client, (model, optimizer))
        assert model.weight.grad is not None and model.weight.grad.tolist() == [[0.5, 0.5]]

    NaiveCluster(2).run(work)


def test_join_trusts_the_windows_more_than_the_order_of_the_last_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NaiveSession, "join", lambda self: 1)

    def work(client: Client) -> int:
        w = nn.Parameter(torch.tensor([0.0]))
        optimizer = wrap(client, torch.optim.SGD([w], lr=0.1), [("w", w)])
        if client.session.rank != 1:
            client.session.cluster.joined.append(1)  # type: ignore[attr-defined]
            optimizer.step()
        return agreement.join(client, ())

    assert NaiveCluster(2).run(work) == [0, 0]


def test_join_refuses_what_holds_no_tensors() -> None:
    with pytest.raises(TypeError, match="list: pass modules"):
        NaiveCluster(1).run(lambda client: agreement.join(client, ([1],)))


def check(states: list[dict[str, torch.Tensor]]) -> None:
    NaiveCluster(len(states)).run(
        lambda client: agreement.require_in_sync(client, states[client.session.rank])
    )


def test_equal_bits_are_in_sync() -> None:
    strided = torch.arange(6.0).view(2, 3).t()
    check([{"a": strided, "b": torch.tensor(float("nan"))} for _ in range(3)])
    check([{"a": strided}, {"a": strided.contiguous()}])
    check([{}, {}])
    model = nn.Linear(2, 2)
    NaiveCluster(2).run(lambda client: agreement.require_in_sync(client, model))


def test_the_first_differing_tensors_and_ranks_are_named() -> None:
    states = [{f"t{i}": torch.tensor(float(i)) for i in range(5000)} for _ in range(3)]
    states[1]["t4500"] = torch.tensor(4500.0).nextafter(torch.tensor(0.0))
    states[2]["t7"] = torch.tensor(-7.0)
    words = r"2 tensors are not .*: t7 \(ranks \[2\] .*t4500 \(ranks \[1\] differ from rank 0\)"
    with pytest.raises(MismatchError, match=words):
        check(states)


def test_another_zero_dtype_shape_or_name_is_a_difference() -> None:
    zero = torch.zeros(2)
    for other in (-zero, zero.double(), zero.view(2, 1)):
        with pytest.raises(MismatchError, match=r"1 tensors .* a \(ranks \[1\]"):
            check([{"a": zero}, {"a": other}])
    with pytest.raises(MismatchError, match=r"[ab] \(ranks \[1\]"):  # each rank's own name
        check([{"a": zero}, {"b": zero}])
    with pytest.raises(MismatchError, match=r"b|number 1"):
        check([{"a": zero, "b": zero}, {"a": zero}])
