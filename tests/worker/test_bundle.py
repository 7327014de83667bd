"""Lists of small tensors travel in one buffer: values, dtypes, layouts, memory, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsum.errors import MismatchError, UsageError
from gradsum.worker.client import Client
from gradsum.worker.compression import Compression
from tests.worker.naive import NaiveCluster
from tests.worker.test_pushpull import start

RANKS = 3


def mixed(rank: int, version: int) -> list[torch.Tensor]:
    """Dtypes, shapes and strides of all kinds, other values on each rank and call."""
    base = torch.arange(24.0).view(4, 6) * (rank + 1) + version
    return [
        base.clone(), base.T[1:4], torch.tensor(float(rank + version)), base.to(torch.int64),
        base.bfloat16(), torch.empty(0, 3), base.to(torch.complex64), base[0].double(),
        base[1].double(), base[2].expand(3, 6), torch.full((5,), rank + 1, dtype=torch.int64),
    ]  # fmt: skip


@pytest.mark.parametrize("inplace", [False, True])
def test_every_tensor_of_a_list_is_the_sum_over_ranks(inplace: bool) -> None:
    def work(client: Client) -> list[list[torch.Tensor]]:
        rank = client.session.rank
        calls = []
        for version in range(3):
            given = [t.clone() if inplace else t for t in mixed(rank, version)]
            got: Any = start(client, given, "g", average=False, inplace=inplace).wait()
            if inplace:
                assert all(one is other for one, other in zip(got, given, strict=True))
            calls.append([one.clone() for one in got])
        return calls

    for calls in NaiveCluster(RANKS).run(work):
        for version, got in enumerate(calls):
            lists = [mixed(rank, version) for rank in range(RANKS)]
            for place, one in enumerate(got):
                parts = [each[place] for each in lists]
                expected = parts[0].clone()
                for part in parts[1:]:
                    expected = expected + part
                assert one.dtype == parts[0].dtype and one.shape == parts[0].shape
                assert torch.equal(one, expected), place


def test_means_casts_and_one_service_tensor_a_dtype() -> None:
    cluster = NaiveCluster(2)

    def work(client: Client) -> Any:
        rank = client.session.rank
        rows = [torch.full((3,), 2.0 * rank), torch.full((2, 2), 4.0 * rank + 1)]
        half = start(client, rows, "h", compression=Compression.bf16).wait()
        return half, start(client, rows, "m").wait()

    for half, mean in cluster.run(work):
        for first, second in (half, mean):
            assert first.tolist() == [1.0] * 3 and second.tolist() == [[3.0] * 2] * 2
            assert first.dtype == torch.float32
    assert {name for _, name, _, _ in cluster.handed} == {"h[float32]", "m[float32]"}


def test_large_tensors_and_a_lonely_small_one_travel_alone() -> None:
    cluster = NaiveCluster(2, pack_bytes=64)

    def work(client: Client) -> Any:
        rank = client.session.rank
        rows = [torch.full((16,), float(rank)), torch.ones(2), torch.ones(17), torch.ones(1).int()]
        return start(client, rows, "g", average=False).wait()

    for got in cluster.run(work):
        assert [t[0].item() for t in got] == [1.0, 2.0, 2.0, 2]
    assert {name for _, name, _, _ in cluster.handed} == {"g.0", "g.1", "g.2", "g.3"}


def test_a_list_that_changes_its_shape_is_refused_by_name() -> None:
    def work(client: Client) -> None:
        start(client, [torch.ones(2), torch.ones(3)], "g").wait()
        with pytest.raises(MismatchError, match=r"'g\.1' was float32\[3\], now float32\[4\]"):
            start(client, [torch.ones(2), torch.ones(4)], "g")

    NaiveCluster(1).run(work)


def test_ranks_whose_lists_differ_hear_both_sides() -> None:
    def work(client: Client) -> None:
        sizes = (2, 3) if client.session.rank else (3, 2)  # the same number of elements
        start(client, [torch.ones(n) for n in sizes], "g").wait()

    with pytest.raises(MismatchError, match=r"'g\.0': float32\[[23]\] and float32\[[23]\]"):
        NaiveCluster(2).run(work)


def test_rounds_of_one_list_may_overlap_and_results_are_not_overwritten() -> None:
    def work(client: Client) -> list[float]:
        rank = client.session.rank
        handles = [
            start(client, [torch.full((2,), float(rank + v)), torch.ones(3)], "g", average=False)
            for v in (10, 20)
        ]
        results: list[Any] = [handle.wait() for handle in handles]
        later: Any = start(client, [torch.zeros(2), torch.zeros(3)], "g", average=False).wait()
        assert later[0].tolist() == [0.0, 0.0]
        return [one[0][1].item() for one in results]

    assert NaiveCluster(2).run(work) == [[21.0, 41.0]] * 2


def test_v2_a_list_in_place_keeps_its_memory_until_the_round_is_over() -> None:
    rows = [torch.ones(4), torch.ones(2)]
    free = torch.ones(4)

    def work(client: Client) -> None:
        if client.session.rank == 1:
            client.session.barrier()
            start(client, [torch.ones(4), torch.ones(2)], "g", inplace=True).wait()
            return
        handle = start(client, rows, "g", inplace=True)
        for again in (rows[0], rows[1]):
            with pytest.raises(UsageError, match="shares memory with 'g"):
                start(client, again, "other")
            with pytest.raises(UsageError, match="shares memory|is pushed again"):
                start(client, [again, free], "more")
        client.session.barrier()
        handle.wait()

    NaiveCluster(2).run(work)


def test_one_tensor_twice_in_a_list_in_place_is_refused() -> None:
    def work(client: Client) -> None:
        row = torch.ones(4)
        with pytest.raises(UsageError, match="shares memory"):
            start(client, [row, row], "g", inplace=True)
        with pytest.raises(UsageError, match="shares memory"):
            start(client, [row[:3], row[2:]], "g", inplace=True)
        start(client, [row[:2], row[2:]], "h", inplace=True).wait()

    NaiveCluster(1).run(work)


def test_a_tensor_changed_while_its_list_is_on_the_way_is_an_error() -> None:
    def work(client: Client) -> None:
        rows = [torch.ones(4), torch.ones(2)]
        handle = start(client, rows, "g", inplace=True)
        rows[1].add_(1)
        with pytest.raises(UsageError, match="was changed while its sum was on the way"):
            handle.wait()

    NaiveCluster(1).run(work)
