"""All-reduce over the service: what a process group does with sums and means.

Rules: a call is known by the group, dtype, number of elements and lane (V2), so ranks need no names
and calls of one size do not wait for each other; every rank makes the same calls in the same order,
as all collectives ask. Each call is a fence point. A name lives as long as the job: beyond NAMES of
them the group does without the service, on all ranks from the same call on.
"""

from __future__ import annotations

from typing import Final

import torch

from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import TensorSpec
from gradsum.worker.client import Client
from gradsum.worker.face import Handle
from gradsum.worker.marks import marked
from gradsum.worker.pushpull import MOST_URGENT
from gradsum.worker.sinks import TensorSink
from gradsum.worker.tensors import SUMMED, dtype_name, require_dense, source_bytes, spec_of

LANES: Final = 4
"""Calls of one dtype and size that may be under way at once."""

NAMES: Final = 4096
"""Names of one group."""


class Sum:
    """One tensor of a call on its way."""

    __slots__ = ("_sink", "handle", "tensor")

    def __init__(self, tensor: torch.Tensor, sink: TensorSink, handle: Handle) -> None:
        self.tensor = tensor
        self.handle = handle
        self._sink = sink

    def finish(self) -> torch.Tensor:
        """The tensor with its sum, once the handle is done."""
        return self._sink.finish()


class AllReduce:
    """Sums and means over all workers of the job, of one process group."""

    def __init__(self, client: Client, group: str) -> None:
        self._client = client
        self._group = group
        self._calls: dict[tuple[torch.dtype, int], int] = {}
        self._names = 0

    def takes(self, tensor: torch.Tensor, *, average: bool) -> bool:
        """Whether the service does this call; the same on all ranks."""
        if tensor.dtype not in SUMMED or tensor.layout != torch.strided or not tensor.numel():
            return False
        if average and not (tensor.is_floating_point() or tensor.is_complex()):
            return False
        calls = self._calls.get((tensor.dtype, tensor.numel()), 0)
        return calls >= LANES or self._names < NAMES

    @marked("gradsum::push")
    def begin(self, tensor: torch.Tensor, *, average: bool) -> Sum:
        """Begin one call; the tensor is not to be touched before the handle is done."""
        session = self._client.session
        session.check()
        session.mark_step()
        spec = self._spec(tensor)
        entry = self._client.enter([spec])[0]
        sink = TensorSink(tensor, spec.wire, average)
        handle = entry.submit(session, source_bytes(tensor, spec), sink, MOST_URGENT)
        return Sum(tensor, sink, handle)

    def _spec(self, tensor: torch.Tensor) -> TensorSpec:
        kind = (tensor.dtype, tensor.numel())
        calls = self._calls[kind] = self._calls.get(kind, 0) + 1
        self._names += calls <= LANES
        name = f"{self._group}/{dtype_name(tensor.dtype)}x{tensor.numel()}.{calls % LANES}"
        spec = spec_of(name, require_dense(tensor, name), Policy())
        return spec._replace(shape=(tensor.numel(),))
