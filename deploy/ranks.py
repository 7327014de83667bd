"""Who is which rank: torchrun's variables for the workers of one launcher.

Rules: what the launcher sets wins over what it inherited, so no variable that could say otherwise
is passed on; everything else is, unchanged. Under Slurm every task of a step is one launcher.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gradsum.errors import ConfigError

_RANKS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "GRADSUM_RANK", "GRADSUM_WORLD_SIZE", "GRADSUM_LOCAL_RANK", "GRADSUM_LOCAL_SIZE",
)  # fmt: skip
_JOB = (
    "GRADSUM_COORDINATOR", "GRADSUM_JOB", "GRADSUM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
DEFAULT_MASTER_PORT = 29_500  # torchrun's, where no port can be agreed upon


@dataclass(frozen=True, slots=True)
class Layout:
    """``launchers`` of which this is number ``launcher``, each with ``workers`` workers.

    ``beside`` launchers share this host and this is number ``place`` of them.
    """

    workers: int
    launchers: int = 1
    launcher: int = 0
    beside: int = 1
    place: int = 0

    @property
    def world(self) -> int:
        return self.workers * self.launchers

    def rank(self, local: int) -> int:
        """Global rank of this launcher's worker number ``local``."""
        return self.launcher * self.workers + local


def layout(workers: int, nodes: int | None, node: int | None, env: Mapping[str, str]) -> Layout:
    """From --nnodes and --node-rank, else from Slurm, else one launcher. Raises ConfigError."""
    if nodes is None and node is None and "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        return _slurm(workers, env)
    nodes = 1 if nodes is None else nodes
    if node is None and nodes > 1:
        raise ConfigError("--nnodes needs --node-rank", hint=f"--node-rank 0 to {nodes - 1}")
    if not 0 <= (node or 0) < nodes:
        raise ConfigError(
            f"--node-rank {node} is not below --nnodes {nodes}", hint="node ranks start at 0"
        )
    return Layout(workers, nodes, node or 0)


def _slurm(workers: int, env: Mapping[str, str]) -> Layout:
    def number(name: str, default: str) -> int:
        text = env.get(name, default)
        if not text.isdigit():
            raise ConfigError(f"{name}={text!r} is not a number", hint="Slurm sets it; see srun")
        return int(text)

    tasks = number("SLURM_NTASKS", "1")
    beside = max(1, tasks // max(1, number("SLURM_NNODES", "1")))
    task, place = number("SLURM_PROCID", "0"), number("SLURM_LOCALID", "0")
    return Layout(workers, tasks, task, beside, place)


def first_host(nodelist: str) -> str:
    """The first name of a Slurm node list: ``node[03-05,9],x1`` -> ``node03``."""
    match = re.match(r"([^,\[]+)(?:\[([^-,\]]+))?", nodelist)
    return match[1] + (match[2] or "") if match else ""


def without_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an outer launcher says about ranks."""
    return {name: value for name, value in env.items() if name not in _RANKS}


def clean(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without anything that says who is which rank of which job."""
    return {name: value for name, value in without_ranks(env).items() if name not in _JOB}


def master_address(
    where: Layout, env: Mapping[str, str], address: str | None, port: int | None
) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT for torch.distributed; gradsum itself needs neither.

    With several launchers the address is left out where nobody has said it: a wrong one is worse.
    ``port`` is required when there is one launcher.
    """
    if where.launchers == 1:
        return {"MASTER_ADDR": address or "127.0.0.1", "MASTER_PORT": str(port)}
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    host = address or env.get("MASTER_ADDR") or first_host(nodes)
    chosen = str(port or env.get("MASTER_PORT") or DEFAULT_MASTER_PORT)
    return {"MASTER_PORT": chosen} | ({"MASTER_ADDR": host} if host else {})


def worker_variables(where: Layout, local: int) -> dict[str, str]:
    """torchrun's rank variables of worker ``local`` of this launcher."""
    rank, world = str(where.rank(local)), str(where.world)
    return {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(where.place * where.workers + local),
        "LOCAL_WORLD_SIZE": str(where.beside * where.workers),
        "GROUP_RANK": str(where.launcher),
        "GROUP_WORLD_SIZE": str(where.launchers),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
    }
