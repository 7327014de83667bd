"""push_pull over several ranks: values, names, versions, memory."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

import pytest
import torch

from gradsum.errors import MismatchError, NotBuilt, UsageError
from gradsum.scheduler.policy import Policy
from gradsum.worker import pushpull
from gradsum.worker.client import Client
from gradsum.worker.compression import Compression
from gradsum.worker.pushpull import MOST_URGENT, PushPullHandle
from tests.worker.naive import NaiveCluster, settled


def start(client: Client, tensor: Any, name: str | None = "x", **how: Any) -> PushPullHandle:
    options: dict[str, Any] = {
        "average": True, "priority": None, "compression": Compression.none, "inplace": False,
    } | how  # fmt: skip
    return pushpull.start(client, tensor, name=name, **options)


def each(rows: list[torch.Tensor], late: bool = False, **how: Any) -> list[torch.Tensor]:
    """One push_pull of a row per rank."""

    def work(client: Client) -> Any:
        return start(client, rows[client.session.rank], **how).wait()

    return NaiveCluster(len(rows), late=late).run(work)


@pytest.mark.parametrize("late", [False, True])
def test_c01_bfloat16_means_are_exact(late: bool) -> None:
    rows = [torch.tensor([1.5, -3.0]).bfloat16(), torch.tensor([2.5, 5.0]).bfloat16()]
    for got in each(rows, late):
        assert got.dtype == torch.bfloat16 and got.tolist() == [2.0, 1.0]


def test_c49_complex_means_keep_the_imaginary_part() -> None:
    for dtype in (torch.complex64, torch.complex128, torch.complex32):
        rows = [torch.tensor([1 + 2j]).to(dtype), torch.tensor([3 - 4j]).to(dtype)]
        for got in each(rows):
            assert got.dtype == dtype and got.to(torch.complex64).tolist() == [2 - 1j]


def test_c67_conjugated_and_negated_views() -> None:
    for got in each([torch.tensor([1 + 2j]).conj(), torch.tensor([3 + 4j])], average=False):
        assert got.tolist() == [4 + 2j]
    for got in each([torch.tensor([1 + 2j]).conj().imag, torch.tensor([5.0])], average=False):
        assert got.tolist() == [3.0]


def test_c71_layouts_may_differ_between_ranks() -> None:
    rows = [torch.arange(144.0).view(4, 4, 3, 3), torch.arange(144.0).view(4, 4, 3, 3) * 3]
    rows[0] = rows[0].to(memory_format=torch.channels_last)
    for row, got in zip(rows, each(rows, inplace=True), strict=True):
        assert got is row and torch.equal(got, torch.arange(144.0).view(4, 4, 3, 3) * 2)
    assert rows[0].stride() == (36, 1, 12, 4)


def test_c79_empty_tensors() -> None:
    for got in each([torch.empty(0, 3), torch.empty(0, 3)]):
        assert got.shape == (0, 3)


def test_c94_zero_dim_ints_and_losses() -> None:
    for got in each([torch.tensor(3.0), torch.tensor(5.0)]):
        assert got.shape == () and got.item() == 4.0
    assert [t.item() for t in each([torch.tensor(4), torch.tensor(4)], average=False)] == [8, 8]
    weight = torch.ones(3, requires_grad=True)
    losses = [(weight * 2).sum(), (weight * 4).sum()]
    for got in each(losses):
        assert got.item() == 9.0 and not got.requires_grad
    losses[0].backward()
    assert weight.grad is not None and weight.grad.tolist() == [2, 2, 2]


def test_integers_are_floored() -> None:
    assert [t.item() for t in each([torch.tensor(-4), torch.tensor(1)])] == [-2, -2]


def test_a_list_is_summed_together_under_numbered_names() -> None:
    cluster = NaiveCluster(2)

    def work(client: Client) -> Any:
        rank = client.session.rank
        return start(client, [torch.tensor(float(rank)), torch.full((2,), 4.0 * rank)], "g").wait()

    for first, second in cluster.run(work):
        assert first.item() == 0.5 and second.tolist() == [2.0, 2.0]
    assert [spec.name for spec in cluster.table.since(0)] == ["g.0", "g.1", "g[float32]"]
    assert {name for _, name, _, _ in cluster.handed} == {"g[float32]"}


@pytest.mark.parametrize("late", [False, True])
def test_c47_a_second_push_is_the_next_round(late: bool) -> None:
    first_in = threading.Event()

    def work(client: Client) -> list[float]:
        rank = client.session.rank
        if rank == 1:
            first_in.wait(10)
        values = [1.0, 100.0] if rank == 0 else [2.0, 200.0]
        handles = [start(client, torch.tensor(v), average=False) for v in values]
        first_in.set()
        return [handle.wait().item() for handle in handles]  # type: ignore[union-attr]

    assert NaiveCluster(2, late=late).run(work) == [[3.0, 300.0]] * 2


def test_v2_memory_whose_round_is_open_is_not_pushed() -> None:
    tensor, other = torch.ones(4), torch.ones(4)

    def work(client: Client) -> None:
        if client.session.rank == 1:
            client.session.barrier()
            start(client, other).wait()
            return
        handle = start(client, tensor)
        with pytest.raises(UsageError, match=r"(?s)'x' is pushed again.*synchronize\(\)"):
            start(client, tensor[2:])
        with pytest.raises(UsageError, match="'y' shares memory with 'x'"):
            start(client, tensor, "y", inplace=True)
        with pytest.raises(UsageError, match="shares memory"):
            start(client, [other, other], "z", inplace=True)
        client.session.barrier()
        handle.wait()

    NaiveCluster(2).run(work)


def test_a_change_under_way_is_reported() -> None:
    def work(client: Client) -> None:
        tensor = torch.ones(2)
        handle = start(client, tensor)
        tensor.mul_(2)
        client.session.barrier()
        with pytest.raises(UsageError, match="'x' was changed while its sum"):
            handle.wait()

    NaiveCluster(2).run(work)


def test_c10_memory_is_free_after_the_wait() -> None:
    def work(client: Client) -> None:
        tensor = torch.empty(50_000)
        for i in range(50):
            tensor.fill_(i)
            got = start(client, tensor, average=False).wait()
            assert isinstance(got, torch.Tensor)
            assert got.min() == got.max() == 2 * i

    NaiveCluster(2, late=True).run(work)


@pytest.mark.parametrize("inplace", [False, True])
def test_c55_a_new_temporary_each_time(inplace: bool) -> None:
    def work(client: Client) -> None:
        rank = client.session.rank
        for size in (1, 1000):
            for i in range(5):
                tensor = torch.full((size,), float(i) + 10 * rank).half()
                got = start(client, tensor, f"tmp{size}", average=False, inplace=inplace).wait()
                assert isinstance(got, torch.Tensor)
                assert got.tolist() == [2 * i + 10] * size
                assert (got is tensor) == inplace
                del tensor, got
                gc.collect()

    NaiveCluster(2).run(work)


def test_c62_results_are_the_callers_own() -> None:
    def work(client: Client) -> None:
        first = start(client, torch.ones(3)).wait()
        assert isinstance(first, torch.Tensor)
        first.add_(1)
        for i in range(20):
            start(client, torch.full((3,), float(i))).wait()
        client.session.close()
        assert first.tolist() == [2, 2, 2]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NaiveCluster(2).run(work)


def test_waiting_twice_gives_the_same_tensor_and_poll_tells() -> None:
    def work(client: Client) -> None:
        tensor = torch.ones(2)
        handle = start(client, tensor)
        client.session.barrier()
        while not handle.poll():
            pass
        tensor.zero_()  # allowed once poll() was true
        assert handle.wait() is handle.wait()
        assert settled(client)

    NaiveCluster(2).run(work)


def test_a_name_stands_for_one_shape_and_dtype() -> None:
    def work(client: Client) -> None:
        start(client, torch.zeros(2)).wait()
        with pytest.raises(
            MismatchError, match=r"name 'x' was float32\[2\], now float32\[3\]; use another name"
        ):
            start(client, torch.zeros(3))
        with pytest.raises(MismatchError, match=r"float32\[2\] as float16"):
            start(client, torch.zeros(2), compression=Compression.fp16)

    NaiveCluster(2).run(work)


def test_ranks_that_disagree_both_hear_of_it() -> None:
    with pytest.raises(MismatchError, match=r"float32\[[12]\] and float32\[[12]\]"):
        each([torch.zeros(1), torch.zeros(2)])


def test_a_name_is_required() -> None:
    with pytest.raises(UsageError, match=r"(?s)needs a name.*other ranks"):
        each([torch.zeros(1)], name=None)


def test_bool_is_refused() -> None:
    with pytest.raises(TypeError, match="uint8"):
        each([torch.tensor([True])])
    with pytest.raises(TypeError, match=r"float, not a tensor.*torch\.tensor"):
        each([1.0])  # type: ignore[list-item]


def test_priority_is_larger_first_outside_and_smaller_first_inside() -> None:
    cluster = NaiveCluster(1)

    def work(client: Client) -> None:
        for name, priority in (("a", None), ("b", 7), ("c", -7)):
            start(client, torch.zeros(1), name, priority=priority).wait()

    cluster.run(work)
    assert [given[3] for given in cluster.handed] == [MOST_URGENT, -7, 7]


def test_a_declared_policy_must_be_built_and_stay() -> None:
    def work(client: Client) -> None:
        with pytest.raises(NotBuilt, match="slack=2"):
            client.declare("y", Policy(slack=2))
        with pytest.raises(UsageError, match="broadcast_parameters"):
            client.declare("y", Policy(kind="broadcast", root=0))
        client.declare("x")
        start(client, torch.zeros(1)).wait()
        client.declare("x")
        with pytest.raises(MismatchError, match="another policy"):
            client.declare("x", Policy(pack="p"))

    NaiveCluster(1).run(work)


def test_c52_names_from_many_threads() -> None:
    def work(client: Client) -> None:
        errors: list[BaseException] = []

        def pushes(thread: int) -> None:
            try:
                for i in range(40):
                    value = torch.full((thread + 1,), float(i + client.session.rank))
                    got = start(client, value, f"t{thread}", average=False).wait()
                    assert isinstance(got, torch.Tensor) and got.tolist() == [2 * i + 1] * (
                        thread + 1
                    )
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=pushes, args=(t,)) for t in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not errors, errors

    NaiveCluster(2).run(work)


def test_c65_all_ranks_get_the_same_bits() -> None:
    rows = [torch.tensor([v]) for v in (1e8, 1.0, -1e8)]
    for _ in range(10):
        assert len({got.item() for got in each(rows, average=False)}) == 1
