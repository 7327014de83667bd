"""The functions behind ``import gradsum``: BytePS's names, bound to this process's one membership.

Rules: this is the edge, the only place of the front end that reads the environment; every call
before ``init()`` and after ``shutdown()`` says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from gradsum import config
from gradsum.errors import UsageError
from gradsum.scheduler.policy import Policy
from gradsum.worker import agreement, broadcast, pushpull
from gradsum.worker.compression import Compression, Compressor, require_compressor
from gradsum.worker.default import default
from gradsum.worker.optimizer import Distributed, wrap
from gradsum.worker.parallel import Parallel
from gradsum.worker.pushpull import PushPullHandle


def init(settings: config.Settings | None = None, **overrides: Any) -> None:
    """Join the job that the environment names, and wait until all its members are there.

    overrides: settings by name (``init(coordinator="host:port", rank=0, world_size=2)``). Without a
    coordinator and with a world size of 1 the process runs alone. Raises ConfigError, Refused,
    Unreachable or StallTimeout, each naming cause and remedy.
    """
    overrides.pop("lazy", None)
    if settings is not None and overrides:
        raise UsageError("init() takes settings or overrides, not both")
    if settings is None:
        file = overrides.pop("config", None)
        config.require_known(overrides)
        settings = config.load(overrides, os.environ, Path(file) if file else None)
    default.open(settings)


def shutdown() -> None:
    """Leave the job; a second call does nothing. Results that you hold stay yours."""
    default.close()


def is_initialized() -> bool:
    """Whether ``init`` was called and ``shutdown`` was not."""
    return default.client is not None


def rank() -> int:
    """This process's rank, from 0."""
    return default.get().session.rank


def size() -> int:
    """Workers in the job."""
    return default.get().session.size


def local_rank() -> int:
    """This process's rank on its machine."""
    return default.get().session.local_rank


def local_size() -> int:
    """Workers on this machine."""
    return default.get().session.local_size


def declare(name: str, policy: Policy | None = None) -> None:
    """Fix the policy of a name before its first push_pull; the same on all ranks."""
    default.get().declare(name, policy)


@overload
def push_pull(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int | None = None,
    compression: Compressor = Compression.none,
) -> torch.Tensor: ...


@overload
def push_pull(
    tensor: Sequence[torch.Tensor],
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int | None = None,
    compression: Compressor = Compression.none,
) -> list[torch.Tensor]: ...


def push_pull(
    tensor: Any,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int | None = None,
    compression: Compressor = Compression.none,
) -> Any:
    """The mean (``average=False``: the sum) over all ranks, as a new tensor of the same dtype and
    shape. Integers are divided with floor. A list is summed together under ``name.0``, ``name.1``.

    name: what the ranks call it, required. version: taken for BytePS scripts and not used, since
    versions count the calls (V2). priority: larger goes first; by default most urgent.
    """
    return synchronize(push_pull_async(tensor, average, name, version, priority, compression))


def push_pull_inplace(
    tensor: Any,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int | None = None,
    compression: Compressor = Compression.none,
) -> Any:
    """``push_pull`` with the result in the tensors that were given."""
    handle = push_pull_async_inplace(tensor, average, name, version, priority, compression)
    return synchronize(handle)


def push_pull_async(
    tensor: pushpull.Tensors,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int | None = None,
    compression: Compressor = Compression.none,
) -> PushPullHandle:
    """Begin a push_pull; do not change the tensor before ``synchronize(handle)``."""
    return _start(tensor, average, name, priority, compression, inplace=False)


def push_pull_async_inplace(
    tensor: pushpull.Tensors,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int | None = None,
    compression: Compressor = Compression.none,
) -> PushPullHandle:
    """Begin a push_pull_inplace; neither read nor change the tensor before ``synchronize``."""
    return _start(tensor, average, name, priority, compression, inplace=True)


def _start(
    tensor: pushpull.Tensors,
    average: bool,
    name: str | None,
    priority: int | None,
    compression: Compressor,
    inplace: bool,
) -> PushPullHandle:
    return pushpull.start(
        default.get(),
        tensor,
        name=name,
        average=average,
        priority=priority,
        compression=require_compressor(compression),
        inplace=inplace,
    )


def _handle(handle: object) -> PushPullHandle:
    if isinstance(handle, PushPullHandle):
        return handle
    raise TypeError(f"{type(handle).__name__} is no handle: pass what push_pull_async returned")


def poll(handle: PushPullHandle) -> bool:
    """Whether ``synchronize(handle)`` would return at once."""
    return _handle(handle).poll()


def synchronize(handle: PushPullHandle) -> Any:
    """Wait for a handle's result; a second call returns the same tensor."""
    return _handle(handle).wait()


def broadcast_parameters(
    params: broadcast.Named, root_rank: int = 0, prefix: str = "Parameter."
) -> None:
    """Overwrite the tensors of a state_dict, dict or list of pairs with the root's, in place."""
    broadcast.parameters(default.get(), params, root_rank, prefix)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Give all ranks the root's optimizer state; parameters do not move."""
    broadcast.optimizer_state(default.get(), optimizer, root_rank)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's value on all ranks: msgpack types, tuples, tensors, arrays; else TypeError."""
    return broadcast.value(default.get(), obj, root_rank, name)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor | None = None,
    backward_passes_per_step: int = 1,
    *,
    model: torch.nn.Module | None = None,
    cross_barrier: bool = False,
) -> Distributed:
    """The same optimizer, whose ``step()`` uses the mean of all ranks' gradients.

    Gradients of several backward passes are summed on each rank, then averaged over the ranks.
    model: lets the forward order be learnt, so that what is needed first arrives first.
    """
    return wrap(
        default.get(),
        optimizer,
        named_parameters,
        compression,
        backward_passes_per_step,
        model=model,
        cross_barrier=cross_barrier,
    )


def DistributedDataParallel(
    module: torch.nn.Module,
    device_ids: Sequence[int] | None = None,
    broadcast_buffers: bool = True,
    compression: Compressor | None = None,
) -> Parallel:
    """BytePS's wrapper of a model: gradients are means over the ranks when backward() returns, for
    any optimizer. ``no_sync()`` accumulates; state_dict names begin with "module.".

    device_ids: taken and not used, the module stays where it is. Torch's own
    DistributedDataParallel works too: ``gradsum.torch.attach``.
    """
    return Parallel(default.get(), module, broadcast_buffers, require_compressor(compression))


def CrossBarrier(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor | None = None,
    backward_passes_per_step: int = 1,
    num_steps: int = 10**6,
) -> Distributed:
    """BytePS's name of ``DistributedOptimizer(..., model=model, cross_barrier=True)``.

    num_steps: taken and not used, no step is the last one before it is asked for.
    """
    return DistributedOptimizer(
        optimizer, named_parameters, compression, backward_passes_per_step,
        model=model, cross_barrier=True,
    )  # fmt: skip


def get_pushpull_speed() -> tuple[int, float]:
    """(time in ms, MB/s over the last interval)."""
    return default.get().session.speed()


def barrier() -> None:
    """Wait until all ranks are here."""
    default.get().session.barrier()


def mark_step() -> None:
    """End of a step of a program without DistributedOptimizer: here the job may be re-planned."""
    default.get().session.mark_step()


def flush() -> None:
    """End the windows of all wrapped optimizers in which gradients are waiting."""
    for wrapped in default.get().optimizers():
        wrapped.flush()


def join(*states: Any) -> int:
    """This rank has no more batches: wait for the others, then take the last rank's weights.

    states: modules, wrapped optimizers or dicts of tensors to take; by default the parameters of
    all wrapped optimizers. Sums are still divided by the number of all ranks. Returns the rank that
    joined last.
    """
    return agreement.join(default.get(), states)


def assert_in_sync(model: torch.nn.Module | Mapping[str, Any]) -> None:
    """MismatchError on all ranks if a tensor of the model or state_dict is not the same bits."""
    agreement.require_in_sync(default.get(), model)
