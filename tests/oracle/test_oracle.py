"""Twenty of PyTorch's tests in each run; ``make oracle`` runs all, on gloo too."""

from __future__ import annotations

import pytest

from tests.oracle.run import compare, on

CHOSEN = """test_DistributedDataParallelCPU test_DistributedDataParallelCPU_grad_is_view
test_DistributedDataParallel_requires_grad test_accumulate_gradients_no_sync
test_accumulate_gradients_no_sync_allreduce_with_then_hook test_all_gather_coalesced_simple
test_all_gather_object_subgroup test_all_reduce_coalesced_sum test_all_reduce_full_group_sum
test_all_reduce_product test_all_reduce_sum_async test_all_reduce_sum_complex test_barrier
test_batch_isend_irecv_gloo test_ddp_create_graph test_get_future test_reduce_sum_twice
test_scatter_object_list test_sparse_all_reduce_sum test_static_graph_api_cpu""".split()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_passes_with_gloo_passes_with_gradsum() -> None:
    found = on("gradsum", CHOSEN, ranks=3)
    assert [name for name, (how, _) in found.items() if how == "passed"] == CHOSEN, compare(
        dict.fromkeys(CHOSEN, ["passed", ""]), found
    )
