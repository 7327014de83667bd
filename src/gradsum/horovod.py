"""Horovod's torch interface over gradsum: ``import gradsum.horovod as hvd`` instead of
``import horovod.torch as hvd``.

Names, argument order and meaning are Horovod's. Rules: a call without a name is known by its kind,
dtype and shape, and by how many there have been, so ranks make such calls in the same order, as
Horovod's generated names ask too. What has no counterpart (Adasum, process sets, minima) raises,
and says so.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from gradsum.errors import UsageError
from gradsum.worker import api, gathers
from gradsum.worker import broadcast as broadcasts
from gradsum.worker.api import broadcast_object as broadcast_object
from gradsum.worker.api import broadcast_optimizer_state as broadcast_optimizer_state
from gradsum.worker.api import broadcast_parameters as broadcast_parameters
from gradsum.worker.api import is_initialized as is_initialized
from gradsum.worker.api import local_rank as local_rank
from gradsum.worker.api import local_size as local_size
from gradsum.worker.api import rank as rank
from gradsum.worker.api import shutdown as shutdown
from gradsum.worker.api import size as size
from gradsum.worker.collectives import LANES
from gradsum.worker.compression import Compression as Compression
from gradsum.worker.compression import Compressor, require_compressor
from gradsum.worker.default import default
from gradsum.worker.objects import decode, encode
from gradsum.worker.optimizer import Distributed, wrap
from gradsum.worker.pushpull import PushPullHandle
from gradsum.worker.tensors import dtype_name, wire_bytes


class ReduceOp(enum.Enum):
    """What an allreduce makes of the ranks' tensors."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


class Handle(Protocol):
    """What an asynchronous call returns."""

    def poll(self) -> bool:
        """Whether ``wait`` would return at once."""

    def wait(self) -> Any:
        """The result."""


class _Scaled:
    """An allreduce whose result is multiplied."""

    def __init__(self, handle: PushPullHandle, factor: float) -> None:
        self._handle = handle
        self._factor = factor
        self._result: Any = None

    def poll(self) -> bool:
        return self._handle.poll()

    def wait(self) -> Any:
        if self._result is None:
            self._result = self._handle.wait()
            if self._factor != 1.0:
                many = isinstance(self._result, list)
                for tensor in self._result if many else [self._result]:
                    tensor.mul_(self._factor)
        return self._result


class _Broadcast:
    """A broadcast on its way."""

    def __init__(self, flight: broadcasts.Flight, tensor: torch.Tensor) -> None:
        self._flight = flight
        self._tensor = tensor

    def poll(self) -> bool:
        return self._flight.done()

    def wait(self) -> torch.Tensor:
        self._flight.wait()
        return self._tensor


# -- membership ------------------------------------------------------------------------------


def init(*_: Any, **settings: Any) -> None:
    """Join the job that the environment names."""
    _refuse_process_set(settings.pop("process_sets", None))
    api.init(**settings)


def cross_size() -> int:
    """Machines of the job, if all have as many workers as this one."""
    return size() // local_size()


def cross_rank() -> int:
    """This machine's number, if all have as many workers."""
    return rank() // local_size()


def is_homogeneous() -> bool:
    """Whether all machines have as many workers as this one."""
    seen = default.get().session.gather("horovod: local size", local_size())
    return len(set(seen.values())) == 1


def _not_built() -> bool:
    """gradsum is none of Horovod's transports."""
    return False


mpi_built = mpi_enabled = mpi_threads_supported = gloo_enabled = gloo_built = _not_built
nccl_built = ccl_built = ddl_built = cuda_built = rocm_built = _not_built


def barrier(process_set: None = None) -> None:
    """Wait until all ranks are here."""
    _refuse_process_set(process_set)
    api.barrier()


def join(device: int = -1) -> int:
    """This rank has no more batches; returns the last rank that joined, whose weights all have."""
    return api.join()


# -- sums ------------------------------------------------------------------------------------


class _AllReduce(torch.autograd.Function):
    """The gradient of a sum over the ranks is the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, how: Callable[[torch.Tensor], Any]) -> Any:
        ctx.how = how
        return how(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.how(grads[0].contiguous()), None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> torch.Tensor:
    """The mean (``op=Sum``: the sum) over all ranks, as a new tensor; differentiable."""

    def how(given: torch.Tensor) -> Any:
        scale = (prescale_factor, postscale_factor, process_set)
        return synchronize(_reduce(given, average, name, op, *scale, compression, inplace=False))

    if tensor.requires_grad and torch.is_grad_enabled():
        out: torch.Tensor = _AllReduce.apply(tensor, how)  # type: ignore[no-untyped-call]
        return out
    result: torch.Tensor = how(tensor)
    return result


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Handle:
    """Begin an allreduce; do not change the tensor before ``synchronize``."""
    scale = (prescale_factor, postscale_factor, process_set)
    return _reduce(tensor, average, name, op, *scale, Compression.none, inplace=False)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> torch.Tensor:
    """``allreduce`` with the result in the tensor."""
    scale = (prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = synchronize(allreduce_async_(tensor, average, name, op, *scale))
    return result


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Handle:
    """Begin an ``allreduce_``; neither read nor change the tensor before ``synchronize``."""
    scale = (prescale_factor, postscale_factor, process_set)
    return _reduce(tensor, average, name, op, *scale, Compression.none, inplace=True)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> list[torch.Tensor]:
    """``allreduce`` of a list, small ones together."""
    scale = (prescale_factor, postscale_factor, process_set)
    handle = _reduce(list(tensors), average, name, op, *scale, compression, inplace=False)
    result: list[torch.Tensor] = synchronize(handle)
    return result


def _reduce(
    tensor: Any, average: bool | None, name: str | None, op: ReduceOp | None, before: float,
    after: float, process_set: None, compression: Compressor, *, inplace: bool,
) -> Handle:  # fmt: skip
    _refuse_process_set(process_set)
    mean = _means(average, op)
    many = isinstance(tensor, list)
    scaled = tensor
    if before != 1.0:
        if inplace:
            tensor.mul_(before)
        else:
            scaled = [each * before for each in tensor] if many else tensor * before
    start = api.push_pull_async_inplace if inplace else api.push_pull_async
    label = f"allreduce.{name}" if name else _unnamed("allreduce", tensor if many else [tensor])
    handle = start(scaled, mean, label, compression=require_compressor(compression))
    return _Scaled(handle, after)


def _means(average: bool | None, op: ReduceOp | None) -> bool:
    if average is not None and op is not None:
        raise ValueError("pass average= or op=, not both: op=Sum is average=False")
    if op not in (None, Average, Sum):
        raise UsageError(
            f"op={getattr(op, 'value', op)} is not built: the service adds",
            hint="use op=hvd.Average or op=hvd.Sum, or hvd.allgather() and reduce its rows",
        )
    return op is not Sum if average is None else average


def _unnamed(kind: str, tensors: Sequence[torch.Tensor]) -> str:
    """A name for a call that has none: the same on ranks that make the same calls."""
    shapes = ",".join(f"{dtype_name(t.dtype)}{list(t.shape)}" for t in tensors)
    if len(tensors) > 1:
        shapes = hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()
    what = f"{kind}.noname.{shapes}"
    return f"{what}.{default.get().turn(what) % LANES}"


# -- gathers and broadcasts --------------------------------------------------------------------


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: None = None
) -> torch.Tensor:
    """Every rank's rows, one below the other; ranks may differ in the first dimension."""
    result: torch.Tensor = synchronize(allgather_async(tensor, name, process_set))
    return result


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: None = None
) -> Handle:
    """Begin an allgather; waits until all ranks have told their shapes."""
    _refuse_process_set(process_set)
    return gathers.begin(default.get(), tensor, name or "noname")


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's value, in rank order; the types are those of ``broadcast_object``."""
    data = torch.frombuffer(bytearray(encode(obj)), dtype=torch.uint8)
    lengths = allgather(torch.tensor([data.numel()]), f"{name or 'object'}/size").tolist()
    whole = allgather(data, name or "object")
    return [decode(bytes(wire_bytes(part.contiguous()))) for part in whole.split(lengths)]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> torch.Tensor:
    """The root's tensor, as a new one."""
    return broadcast_(tensor.clone(), root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> torch.Tensor:
    """Overwrite the tensor with the root's."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> Handle:
    """Begin a ``broadcast``."""
    return broadcast_async_(tensor.clone(), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> Handle:
    """Begin a ``broadcast_``."""
    _refuse_process_set(process_set)
    label = name or _unnamed("broadcast", [tensor])
    flight = broadcasts.begin(default.get(), [(label, tensor)], root_rank)
    return _Broadcast(flight, tensor)


def poll(handle: Handle) -> bool:
    """Whether ``synchronize(handle)`` would return at once."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for a handle's result."""
    return handle.wait()


# -- training --------------------------------------------------------------------------------


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: None = None,
) -> Distributed:
    """The same optimizer, whose ``step()`` uses the mean (``op=Sum``: the sum) of the gradients.

    gradient_predivide_factor: taken and not used, the service divides once, after the sum, and no
    mean that fits overflows. num_groups, groups: taken and not used, small gradients are packed in
    any case. sparse_as_dense: taken and not used, gradients travel dense.
    """
    _refuse_process_set(process_set)
    compressor = require_compressor(compression)
    return wrap(
        default.get(), optimizer, named_parameters, compressor, backward_passes_per_step,
        average=_means(None, op),
    )  # fmt: skip


def _refuse_process_set(process_set: object) -> None:
    if process_set is not None and getattr(process_set, "process_set_id", 1) != 0:
        raise UsageError(
            "process sets are not built", hint="leave out process_set=: all ranks take part"
        )
