"""Which worker of which launcher is which rank."""

from __future__ import annotations

import pytest

from gradsum.deploy.ranks import (
    Layout,
    clean,
    first_host,
    layout,
    master_address,
    without_ranks,
    worker_variables,
)
from gradsum.errors import ConfigError


def test_ranks_of_two_launchers_are_all_different() -> None:
    found = [
        worker_variables(layout(3, 2, node, {}), local)["RANK"]
        for node in (0, 1)
        for local in (0, 1, 2)
    ]
    assert found == ["0", "1", "2", "3", "4", "5"]


def test_variables_are_torchruns() -> None:
    assert worker_variables(Layout(4, launchers=2, launcher=1), 2) == {
        "RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "6", "ROLE_WORLD_SIZE": "8",
    }  # fmt: skip


STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1"}  # fmt: skip


def test_slurm_one_launcher_a_node() -> None:
    env = STEP | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    assert layout(8, None, None, env) == Layout(8, launchers=2, launcher=1)


def test_slurm_one_launcher_a_task() -> None:
    where = layout(1, None, None, STEP)
    assert where == Layout(1, launchers=4, launcher=3, beside=2, place=1)
    found = worker_variables(where, 0)
    assert [found[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [
        "3", "4", "1", "2"]  # fmt: skip


def test_slurm_batch_script_outside_a_step_is_one_launcher() -> None:
    env = {k: v for k, v in STEP.items() if k != "SLURM_STEP_ID"}
    assert layout(2, None, None, env) == Layout(2)


def test_flags_win_over_slurm() -> None:
    assert layout(2, 3, 2, STEP) == Layout(2, launchers=3, launcher=2)
    assert layout(2, 1, None, STEP) == Layout(2)


@pytest.mark.parametrize(("nodes", "node"), [(2, None), (2, 2), (None, 1), (1, 3)])
def test_contradictions_are_refused(nodes: int | None, node: int | None) -> None:
    with pytest.raises(ConfigError, match="--node-rank|--nnodes"):
        layout(1, nodes, node, {})


def test_bad_slurm_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="SLURM_NTASKS='many'"):
        layout(1, None, None, STEP | {"SLURM_NTASKS": "many"})


@pytest.mark.parametrize(
    ("text", "host"),
    [("node7", "node7"), ("node[03-05,9],x1", "node03"), ("a,b", "a"), ("n[8,9]", "n8"), ("", "")],
)
def test_first_host_of_a_node_list(text: str, host: str) -> None:
    assert first_host(text) == host


def test_master_address_of_one_launcher_ignores_what_is_inherited() -> None:
    env = {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "SLURM_JOB_NODELIST": "n1"}
    assert master_address(Layout(2), env, None, 4000) == {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}  # fmt: skip


def test_master_address_of_several_launchers() -> None:
    two = Layout(1, launchers=2)
    assert master_address(two, {}, None, None) == {"MASTER_PORT": "29500"}
    assert master_address(two, {"SLURM_JOB_NODELIST": "n[1-2]"}, None, 5) == {
        "MASTER_ADDR": "n1", "MASTER_PORT": "5"}  # fmt: skip
    assert master_address(two, {"MASTER_ADDR": "m", "MASTER_PORT": "6"}, None, None) == {
        "MASTER_ADDR": "m", "MASTER_PORT": "6"}  # fmt: skip


def test_only_ranks_and_jobs_are_taken_out_of_the_environment() -> None:
    env = {"RANK": "1", "GRADSUM_RANK": "1", "GRADSUM_JOB": "a", "MASTER_ADDR": "b", "HOME": "/",
           "GRADSUM_LEASE": "9"}  # fmt: skip
    assert clean(env) == {"HOME": "/", "GRADSUM_LEASE": "9"}
    assert without_ranks(env) == clean(env) | {"GRADSUM_JOB": "a", "MASTER_ADDR": "b"}
