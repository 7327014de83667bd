"""Casts for the wire: what is cast, what is left alone, and what the ranks get."""

from __future__ import annotations

import pytest
import torch

from gradsum.worker import pushpull
from gradsum.worker.client import Client
from gradsum.worker.compression import Compression, Compressor, require_compressor
from tests.worker.naive import NaiveCluster

KINDS = [Compression.fp16, Compression.bf16]


def mean(cluster: NaiveCluster, rows: list[torch.Tensor], kind: Compressor) -> list[torch.Tensor]:
    def work(client: Client) -> torch.Tensor:
        handle = pushpull.start(
            client, rows[client.session.rank], name="x", average=True, priority=None,
            compression=kind, inplace=False,
        )  # fmt: skip
        result = handle.wait()
        assert isinstance(result, torch.Tensor)
        return result

    return cluster.run(work)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_travel_as_halves_and_come_back_wide(kind: Compressor, dtype: torch.dtype) -> None:
    cluster = NaiveCluster(2)
    rows = [torch.tensor([1.5, -3.0], dtype=dtype), torch.tensor([2.5, 5.0], dtype=dtype)]
    for got in mean(cluster, rows, kind):
        assert got.dtype == dtype and got.tolist() == [2.0, 1.0]
    assert cluster.table[0].wire == {"fp16": "float16", "bf16": "bfloat16"}[kind.name]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_means_that_fit_do_not_overflow_as_sums(kind: Compressor) -> None:
    rows = [torch.full((3,), 60000.0) for _ in range(3)]
    for got in mean(NaiveCluster(3), rows, kind):
        assert torch.allclose(got, rows[0], rtol=0.01)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bfloat16, torch.complex64])
def test_c49_other_types_travel_as_they_are(kind: Compressor, dtype: torch.dtype) -> None:
    cluster = NaiveCluster(2)
    rows = [torch.tensor([1 + 2j]), torch.tensor([3 - 4j])]
    if not dtype.is_complex:
        rows = [row.real for row in rows]
    for got in mean(cluster, [row.to(dtype) for row in rows], kind):
        assert got.dtype == dtype
        assert got.tolist() == ([2 - 1j] if dtype.is_complex else [2])
    assert cluster.table[0].nbytes == torch.empty(1, dtype=dtype).element_size()


def test_anything_else_is_refused() -> None:
    assert require_compressor(None) is Compression.none
    with pytest.raises(TypeError, match=r"Compression\.bf16"):
        require_compressor("fp16")
