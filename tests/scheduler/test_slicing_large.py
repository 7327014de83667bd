"""Sizes beyond 32 bits: the layout of one tensor of more than 3 GiB, without its data."""

from __future__ import annotations

import pytest

from gradsum.proto.limits import MAX_SLICE
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.slicing import Layout
from gradsum.scheduler.table import Table, TensorSpec

BYTES = 3 * 2**30 + 4


@pytest.mark.parametrize("slice_bytes", [1 << 20, 10**18])
def test_c73_slices_of_three_gibibytes_cover_every_byte_once(slice_bytes: int) -> None:
    table = Table()
    table.append(TensorSpec("large", "float32", "float32", (BYTES // 4,), Policy(), 1))
    layout = Layout(table, slice_bytes=slice_bytes, weights=(1.0, 1.0))
    end = 0
    for number, each in enumerate(layout.units[0].slices):
        assert (each.number, each.offset) == (number, end)
        assert 0 < each.length <= min(slice_bytes, MAX_SLICE)
        assert each.length % 4 == 0
        end += each.length
    assert end == BYTES
