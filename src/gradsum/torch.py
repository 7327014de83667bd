"""gradsum under stock torch training.

``gradsum.torch.attach(model)`` joins the job that the environment names, if that has not happened
yet, and has the service sum the gradients of a DistributedDataParallel model. Importing this module
makes the backend known: ``init_process_group("gradsum")`` joins the job, which
``destroy_process_group()`` leaves again, and groups of all workers sum by the service, under
DistributedDataParallel, FSDP2 and hand-written loops alike. The rest of a script stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel

from gradsum.worker import api, buckets, process_group
from gradsum.worker.client import Client
from gradsum.worker.compression import Compressor, require_compressor
from gradsum.worker.default import default


def attach(
    model: DistributedDataParallel, compression: Compressor | None = None
) -> DistributedDataParallel:
    """Have the service sum the gradients of a DistributedDataParallel model; returns the model.

    Call it once, before the first backward pass. compression: a cast for the wire. The sums are
    divided by the number of all ranks. Raises TypeError for another kind of model, UsageError for a
    process group that is not all workers of the job; a backward pass raises RuntimeError with the
    text of what ended a sum.
    """
    if not api.is_initialized():
        api.init()
    return buckets.attach(default.get(), model, require_compressor(compression))


def _join(rank: int, size: int) -> tuple[Client, Callable[[], None] | None]:
    if api.is_initialized():
        return default.get(), None
    api.init(rank=rank, world_size=size)
    return default.get(), api.shutdown


process_group.register(_join)
