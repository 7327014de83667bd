"""The end of training and its proof: ``join`` for uneven batch counts, ``assert_in_sync``.

Rules: after ``join`` a rank counts in every divisor and gives nothing (E7); the rank that went on
longest has made all steps, so its weights are everybody's. Comparing costs one hash per tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import torch

from gradsum.errors import MismatchError
from gradsum.worker import broadcast
from gradsum.worker.client import Client
from gradsum.worker.tensors import host_copy, wire_bytes

_CHUNK: Final = 4096
"""Hashes in one gather: 8 bytes each, below the limit of 64 KiB."""


def join(client: Client, states: tuple[Any, ...]) -> int:
    """Take no further part in sums, wait for the others, take the last rank's tensors.

    states: modules, wrapped optimizers or dicts of tensors; by default the parameters of all
    wrapped optimizers. Returns the rank that went on longest.
    """
    client.session.check()
    optimizers = client.optimizers()
    for optimizer in optimizers:
        optimizer.flush()
    chosen = states or tuple(optimizers)
    named = [pair for i, state in enumerate(chosen) for pair in _tensors(f"join.{i}.", state)]
    last = _furthest(client, client.session.join(), sum(o.windows for o in optimizers))
    broadcast.tensors(client, named, last)
    return last


def _furthest(client: Client, last: int, windows: int) -> int:
    """The rank that closed the most windows; ``last`` if it is one of several."""
    seen = client.session.gather("join", windows)
    return max(seen, key=lambda rank: (seen[rank], rank == last, -rank))


def _tensors(prefix: str, state: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    elif isinstance(state, torch.optim.Optimizer):
        groups = state.param_groups
        state = {
            f"{g}.{i}": p for g, group in enumerate(groups) for i, p in enumerate(group["params"])
        }
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{type(state).__name__}: pass modules, wrapped optimizers or dicts of tensors"
        )
    return [(f"{prefix}{k}", v) for k, v in state.items() if isinstance(v, torch.Tensor)]


def require_in_sync(client: Client, state: torch.nn.Module | Mapping[str, Any]) -> None:
    """MismatchError on every rank, naming the first tensors whose bits differ and where."""
    client.session.check()
    client.settle()
    named = _tensors("", state)
    digests = [_digest(name, tensor) for name, tensor in named]
    total = hashlib.blake2b(b"".join(digests), digest_size=16).digest()
    seen = client.session.gather("in sync", (len(digests), total))
    if len({tuple(value) for value in seen.values()}) == 1:
        return
    longest = max(value[0] for value in seen.values())
    rows = _all_digests(client, digests, longest)
    wrong = [i for i in range(longest) if len({row[i : i + 1] for row in map(tuple, rows)}) > 1]
    raise MismatchError(_describe([name for name, _ in named], rows, wrong), hint=_HINT)


def _all_digests(client: Client, digests: list[bytes], longest: int) -> list[list[bytes]]:
    rows: list[list[bytes]] = [[] for _ in range(client.session.size)]
    for start in range(0, longest, _CHUNK):
        part = digests[start : start + _CHUNK]
        for rank, values in client.session.gather("in sync: tensors", part).items():
            rows[rank].extend(values)
    return rows


def _describe(names: list[str], rows: list[list[bytes]], wrong: list[int]) -> str:
    few = []
    for i in wrong[:5]:
        name = names[i] if i < len(names) else f"number {i}"
        odd = [rank for rank, row in enumerate(rows) if row[i : i + 1] != rows[0][i : i + 1]]
        few.append(f"{name} (ranks {odd} differ from rank 0)")
    return f"{len(wrong)} tensors are not the same on all ranks: {', '.join(few)}"


def _digest(name: str, tensor: torch.Tensor) -> bytes:
    head = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
    state = hashlib.blake2b(head, digest_size=8)
    state.update(wire_bytes(host_copy(tensor.detach())))
    return state.digest()


_HINT: Final = (
    "broadcast_parameters() before training; then look for updates that only some ranks make"
)
