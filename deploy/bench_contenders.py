"""The ways to sum that ``gradsum bench`` lets take turns, each on the same tensors.

Rules: what a training step would wait for is in ``reduce``, which is timed; results lie where the
inputs were. Gloo and DDP's buckets sum float32 whatever gradsum sends, and plainly: a mean is
gradsum's only, in the form of gradients, since that is what its optimizer gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist

from gradsum.worker import api
from gradsum.worker.compression import Compression, Compressor

Tensors: TypeAlias = Sequence[torch.Tensor]

WIRES: Final[Mapping[str, Compressor]] = MappingProxyType(
    {"fp32": Compression.none, "fp16": Compression.fp16, "bf16": Compression.bf16}
)
_BUCKET: Final = 25 << 20  # bytes; DistributedDataParallel's bucket_cap_mb


def _nothing() -> None:
    pass


class Contender(NamedTuple):
    """``reduce`` is timed, ``after`` is not; the result is the sum divided by ``divisor``."""

    reduce: Callable[[Tensors], None]
    divisor: int = 1
    after: Callable[[], None] = _nothing


class Form(Protocol):
    """What holds the bytes, and how gradsum sums them."""

    contender: Contender

    def tensors(self) -> list[torch.Tensor]:
        """The tensors as they are now: another call may give other objects."""


class Raw:
    """Plain tensors, summed in place by one ``push_pull`` of the list."""

    def __init__(self, counts: Sequence[int], compression: Compressor) -> None:
        self._tensors = [torch.empty(count) for count in counts]
        self._compression = compression
        self.contender = Contender(self._reduce, after=api.mark_step)

    def tensors(self) -> list[torch.Tensor]:
        """Always the same ones."""
        return self._tensors

    def _reduce(self, tensors: Tensors) -> None:
        api.push_pull_inplace(
            list(tensors), average=False, name="bench", compression=self._compression
        )


class Gradients:
    """Gradients of a module whose optimizer is wrapped; a round is ``optimizer.synchronize()``.

    They are set by hand and stay between rounds, as after ``zero_grad(set_to_none=False)``. The
    learning rate is 0. With GRADSUM_SHARE_GRADIENTS the optimizer replaces them when first pushed.
    """

    def __init__(self, counts: Sequence[int], compression: Compressor) -> None:
        self._module = torch.nn.ParameterList(torch.zeros(count) for count in counts)
        for parameter in self._module:
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer = api.DistributedOptimizer(
            torch.optim.SGD(self._module.parameters(), lr=0.0),
            self._module.named_parameters(),
            compression,
        )
        self.contender = Contender(
            lambda tensors: self._optimizer.synchronize(), api.size(), self._step
        )

    def tensors(self) -> list[torch.Tensor]:
        """The gradients."""
        return [parameter.grad for parameter in self._module if parameter.grad is not None]

    def _step(self) -> None:
        with self._optimizer.skip_synchronize():
            self._optimizer.step()


FORMS: Final[Mapping[str, Callable[[Sequence[int], Compressor], Form]]] = MappingProxyType(
    {"tensors": Raw, "gradients": Gradients}
)


def gloo(tensors: Tensors) -> None:
    """One all-reduce for each tensor, all begun at once."""
    _wait([dist.all_reduce(tensor, async_op=True) for tensor in tensors])


class Buckets:
    """What DistributedDataParallel does over Gloo, without its backward pass.

    Its buckets, not the module: the last tensors come first, a bucket is full when it holds 25 MiB
    and is reduced while the next is filled; tensors are copied in and out.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        groups: list[list[int]] = [[]]
        for index in reversed(range(len(counts))):
            if 4 * sum(counts[i] for i in groups[-1]) >= _BUCKET:
                groups.append([])
            groups[-1].append(index)
        self._flats = [torch.zeros(sum(counts[i] for i in group)) for group in groups]
        self._parts = [
            list(zip(group, flat.split([counts[i] for i in group]), strict=True))
            for group, flat in zip(groups, self._flats, strict=True)
        ]

    def reduce(self, tensors: Tensors) -> None:
        """The sums, in place."""
        works = []
        for flat, parts in zip(self._flats, self._parts, strict=True):
            for index, part in parts:
                part.copy_(tensors[index])
            works.append(dist.all_reduce(flat, async_op=True))
        for work, parts in zip(works, self._parts, strict=True):
            _wait([work])
            for index, part in parts:
                tensors[index].copy_(part)


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
