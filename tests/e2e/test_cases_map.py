"""Which test shows which case from the field, so that none is dropped in silence.

Cases have numbers; a test that covers one carries its number in its name, as do the scenarios of
``tests/e2e/scenarios``. Every case of the kinds in scope is listed as shown or, with the reason, as
left for later.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.scenarios import collect

TESTS = Path(__file__).parents[1]

IN_SCOPE: Final = {
    "api-semantics": (5, 8, 25, 26, 28, 29, 40, 50, 53, 56, 64, 68, 95, 100),
    "numerics": (2, 7, 10, 14, 17, 22, 31, 38, 47, 55, 58, 59, 65, 74, 80, 98),
    "dtype-shape": (1, 23, 49, 67, 71, 73, 79, 94),
    "lifecycle": (16, 41, 62, 86),
    "launcher": (19, 34, 85, 89, 92, 101),
    "config": (35, 46, 61),
}

ALSO: Final = (13, 32, 43, 44, 52, 77, 91, 97)
"""Cases of other kinds that are shown already."""

LATER: Final = {
    14: "cross-barrier mode is not built",
    17: "needs a CUDA device",
    31: "asynchronous mode is not built",
    38: "error feedback is not built",
    58: "quantising compressors are not built",
    74: "random-k is not built",
    80: "error feedback is not built",
    98: "error feedback is not built",
}

PARTS_LATER: Final = {
    7: "sparse results: gradients travel dense",
    23: "sparse results: gradients travel dense",
    49: "compressors beyond casts, which pass complex numbers through",
    53: "cross-barrier mode under torch.compile",
    65: "200 steps with top-k and 1-bit",
}

SHOWN: Final = {
    1: "c01_bfloat16_model_and_mean",
    2: "c02_ranks_agree_about_skipping c02_ddp_ranks_agree_about_skipping",
    5: "c05_schedulers_accept_the_wrapped_optimizer",
    7: "c07_duplicate_rows_of_a_sparse_gradient",
    8: "c08_two_optimizers_with_the_same_names",
    10: "c10_memory_is_free_after_the_wait",
    13: "c13_thousands_of_results_outstanding",
    16: "c16_jobs_follow_each_other_on_one_service c16_a_second_job_is_refused_at_once "
    "deploy/test_standalone.py::test_c16_a_service_outlives_a_killed_job_and_forgets_it",
    19: "deploy/test_standalone.py::test_c19_the_failing_rank_is_named_and_gives_the_code "
    "deploy/test_standalone.py::test_c19_a_crashed_server_fails_the_job",
    22: "c22_unused_parameters_do_not_move",
    23: "c23_sparse_gradient_that_is_empty_on_one_rank",
    25: "c25_discarded_gradients_never_reach_an_update",
    26: "c26_optimizer_state",
    28: "c28_uneven_batches c28_a_rank_that_left_is_named "
    "c28_three_ranks_join_one_after_the_other c28_ddp_join_with_uneven_batches "
    "c28_horovods_join_with_uneven_batches",
    29: "c29_accumulation_windows",
    32: "scheduler/test_registry.py::test_c32_a_mismatch_names_the_tensor_and_both_sides",
    34: "deploy/test_standalone.py::test_c34_a_signal_ends_everything "
    "deploy/test_standalone.py::test_c34_a_killed_launcher_takes_everything_along",
    35: "c35_slices_are_whole_elements c35_bad_sizes_are_refused_at_init "
    "test_config.py::test_c35_bad_sizes_are_refused_with_the_variables_name",
    40: "c40_unfrozen_and_added_parameters",
    41: "c41_a_skipped_step_leaves_nothing_in_flight",
    43: "c43_thousands_of_small_tensors",
    44: "worker/test_parameters.py::test_c44_compiled_names_are_plain_names",
    46: "c46_all_processes_agree_on_the_placement",
    47: "c47_a_second_push_is_the_next_round",
    49: "c49_complex_gradients",
    50: "c50_activation_checkpointing_of_a_shared_layer",
    52: "c52_push_pull_from_many_threads",
    53: "c53_hooks_fire_under_compile",
    55: "c55_a_new_temporary_each_time",
    56: "c56_checkpoint_round_trip",
    59: "sim/test_rules_slots.py::test_s1_a_duplicate_has_its_receipt_again_and_counts_once",
    61: "c61_credit_smaller_than_a_slice "
    "test_config.py::test_c61_credit_zero_is_refused_from_every_source",
    62: "c62_results_belong_to_the_caller",
    64: "c64_no_sync_around_backward_only",
    65: "c65_all_ranks_get_the_same_bits the_same_bits_on_every_run_with_four_ranks",
    67: "c67_conjugated_and_negated_views",
    68: "c68_replaced_parameters",
    71: "c71_memory_layouts_differ_between_ranks",
    73: "c73_two_gibibytes_and_more scheduler/test_slicing_large.py::"
    "test_c73_slices_of_three_gibibytes_cover_every_byte_once",
    77: "scheduler/test_coordinator.py::test_c77_bursts_of_messages_are_all_answered",
    79: "c79_parameters_without_elements",
    85: "deploy/test_standalone.py::test_c85_a_port_that_is_taken_is_named "
    "deploy/test_standalone.py::test_c85_the_same_port_again_at_once "
    "deploy/test_standalone.py::test_c85_twenty_launchers_at_once",
    86: "c86_init_and_shutdown_again_and_again "
    "c86_ranks_begin_again_without_waiting_for_each_other",
    89: "deploy/test_standalone.py::test_c89_a_good_job_ends_with_0_soon_after_the_last_worker "
    "deploy/test_standalone.py::test_c89_daemons_by_hand_stay_and_end_with_0_on_sigterm",
    91: "deploy/test_standalone.py::test_c91_everything_listens_on_loopback_only",
    92: "deploy/test_launch.py::test_c92_values_arguments_and_interpreter_arrive_unchanged "
    "deploy/test_launch.py::test_c92_rank_variables_win_over_inherited_ones",
    94: "c94_metrics",
    95: "c95_step_with_a_closure",
    97: "scheduler/test_coordinator.py::test_c97_junk_and_other_protocols_harm_nobody",
    100: "c100_nothing_to_train",
    101: "c101_one_worker_with_and_without_a_service "
    "deploy/test_standalone.py::test_c101_one_worker_with_and_without_a_service",
}  # fmt: skip


def test_every_case_in_scope_is_shown_or_left_for_a_reason() -> None:
    wanted = {number for numbers in IN_SCOPE.values() for number in numbers} | set(ALSO)
    assert not SHOWN.keys() & LATER.keys()
    assert SHOWN.keys() | LATER.keys() == wanted
    assert PARTS_LATER.keys() <= SHOWN.keys()


@pytest.mark.parametrize("number", SHOWN)
def test_the_tests_of_a_case_exist(number: int) -> None:
    scenarios = {name.partition("[")[0] for name in collect()}
    for test in SHOWN[number].split():
        file, _, name = test.rpartition("::")
        if file:
            assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), test
        else:
            assert name in scenarios, test


def test_scenarios_with_a_number_are_in_the_table() -> None:
    found = {name.partition("[")[0] for name in collect()}
    for name in found:
        if match := re.match(r"c(\d+)_", name):
            shown = SHOWN[int(match[1])].split()
            assert any(name.startswith(each) for each in shown), name
