"""allgather: every rank's rows, one below the other, on every rank.

Rules: ranks may have different numbers of rows, and none at all; what is behind the first dimension
and the dtype are the same everywhere, or all ranks get the error; each rank's bits are broadcast,
in memory whose size is rounded up so that few names are used whatever the sizes are.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from gradsum.errors import MismatchError
from gradsum.worker import broadcast
from gradsum.worker.client import Client
from gradsum.worker.tensors import dtype_name, host_copy, require_dense, wire_bytes

_LEAST: Final = 1024
"""Bytes of the smallest piece of memory."""


class Gathering:
    """An allgather on its way."""

    def __init__(
        self, like: torch.Tensor, rows: list[int], rooms: list[torch.Tensor],
        flights: list[broadcast.Flight],
    ) -> None:  # fmt: skip
        self._like = like
        self._rows = rows
        self._rooms = rooms
        self._flights = flights
        self._result: torch.Tensor | None = None

    def poll(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return all(flight.done() for flight in self._flights)

    def wait(self) -> torch.Tensor:
        """The rows of rank 0, then those of rank 1, and so on."""
        if self._result is None:
            for flight in self._flights:
                flight.wait()
            parts = []
            for rows, room in zip(self._rows, self._rooms, strict=True):
                part = torch.empty((rows, *self._like.shape[1:]), dtype=self._like.dtype)
                wire_bytes(part)[:] = wire_bytes(room)[: part.nbytes]
                parts.append(part)
            self._result = torch.cat(parts).to(self._like.device)
        return self._result


def begin(client: Client, tensor: torch.Tensor, name: str) -> Gathering:
    """Begin to gather; all ranks call it with the same name. A single number is a row."""
    mine = host_copy(require_dense(tensor, name).detach())
    mine = mine.reshape(1) if mine.dim() == 0 else mine
    seen = client.session.gather(f"allgather {name}", _described(mine))
    kinds = {rank: (dtype, tuple(rest)) for rank, (dtype, _, rest) in seen.items()}
    odd = next((rank for rank, kind in kinds.items() if kind != kinds[0]), None)
    if odd is not None:
        raise MismatchError(
            f"allgather {name!r}: rank 0 has rows of {kinds[0]}, rank {odd} of {kinds[odd]}",
            tensor=name,
            hint="ranks may differ in the first dimension only",
        )
    rows = [int(seen[rank][1]) for rank in range(client.session.size)]
    each = mine.element_size() * mine.shape[1:].numel()
    rooms, flights = [], []
    for rank, count in enumerate(rows):
        room = torch.zeros(_rounded(count * each), dtype=torch.uint8)
        if rank == client.session.rank:
            wire_bytes(room)[: mine.nbytes] = wire_bytes(mine)
        pair = (f"gathered/{name}/{room.numel()}", room)
        rooms.append(room)
        flights.append(broadcast.begin(client, [pair], rank))
    return Gathering(tensor, rows, rooms, flights)


def _described(tensor: torch.Tensor) -> list[Any]:
    return [dtype_name(tensor.dtype), tensor.shape[0], list(tensor.shape[1:])]


def _rounded(nbytes: int) -> int:
    return max(_LEAST, 1 << max(nbytes - 1, 0).bit_length())
