"""attach(): a stock DistributedDataParallel model whose gradients the service sums.

The model's buckets become tensors of the service, through torch's communication hook. Rules: a
bucket is known by its parameters' names (V2), so torch may rebuild its buckets after the first
step; the first bucket of a backward pass is the fence point, since no sum is on its way there.
What torch exchanges beside gradients (buffers, which parameters were used) goes through the model's
own process group. No ``annotations`` import: torch compares a hook's annotations with its own.
"""

import hashlib
import weakref
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradsum.errors import UsageError
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import TensorSpec
from gradsum.worker.client import Client
from gradsum.worker.compression import Compressor
from gradsum.worker.futures import future_of
from gradsum.worker.marks import marked
from gradsum.worker.naming import plain_name
from gradsum.worker.sinks import TensorSink
from gradsum.worker.tensors import SUMMED, dtype_name, source_bytes, spec_of

_SHOWN = 48
"""Characters of a parameter's name that a bucket's name shows."""


class BucketSums:
    """The communication hook of one model."""

    def __init__(
        self, client: Client, model: DistributedDataParallel, compressor: Compressor
    ) -> None:
        self._client = client
        self._compressor = compressor
        self._group = client.session.next_group("ddp")
        self._model = weakref.ref(model)
        self._names = {id(p): plain_name(name) for name, p in model.module.named_parameters()}

    @marked("gradsum::push")
    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin the round of one bucket; its mean comes back in the bucket's own memory."""
        session = self._client.session
        session.check()
        self._require_static_divisor()
        if bucket.index() == 0:
            session.mark_step()
        buffer = bucket.buffer()
        spec = self._spec(bucket, buffer)
        if session.settings.nan_guard:
            self._require_finite(bucket)
        entry = self._client.enter([spec])[0]
        sink = TensorSink(buffer, spec.wire, average=True)
        handle = entry.submit(session, source_bytes(buffer, spec), sink, -bucket.index())
        return future_of(handle, sink.finish, buffer.device)

    def _spec(self, bucket: GradBucket, buffer: torch.Tensor) -> TensorSpec:
        names = [self._name(parameter) for parameter in bucket.parameters()]
        wire = self._compressor.wire_for(buffer)
        name = f"{self._group}/{_label(names)}"
        return spec_of(name, buffer, Policy(), 1, None if wire is None else dtype_name(wire))

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.get(id(parameter), "?")

    def _require_finite(self, bucket: GradBucket) -> None:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if not torch.isfinite(gradient).all():
                name = self._name(parameter)
                raise UsageError(
                    f"rank {self._client.session.rank}: the gradient of {name!r} is not finite",
                    tensor=name,
                )

    def _require_static_divisor(self) -> None:
        model = self._model()
        if model is not None and not getattr(model, "_divide_by_initial_world_size", True):
            raise UsageError(
                "model.join(divide_by_initial_world_size=False): sums are divided by all ranks",
                hint="call model.join() without it",
            )


def _label(names: Sequence[str]) -> str:
    """A bucket's name: short enough for the table, and another one for every set of parameters."""
    whole = hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
    first, last = names[0][-_SHOWN:], names[-1][-_SHOWN:]
    return f"{first}..{last} ({len(names)}) {whole}"


def attach(
    client: Client, model: DistributedDataParallel, compressor: Compressor
) -> DistributedDataParallel:
    """Have the service sum the gradients of ``model``, which is returned."""
    client.session.check()
    _require_attachable(client, model)
    model.register_comm_hook(None, BucketSums(client, model, compressor).hook)
    return model


def _require_attachable(client: Client, model: object) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach() takes a DistributedDataParallel model, not a {type(model).__name__}: "
            "wrap the model first, or use gradsum.DistributedOptimizer"
        )
    session, group = client.session, model.process_group
    if (group.rank(), group.size()) != (session.rank, session.size):
        raise UsageError(
            f"the model's process group has rank {group.rank()} of {group.size()}, gradsum has "
            f"{session.rank} of {session.size}",
            hint="attach() sums over all workers of the job: leave out process_group=, and start "
            "both with the same ranks",
        )
    refused = [
        plain_name(name) for name, p in model.module.named_parameters()
        if p.requires_grad and p.dtype not in SUMMED
    ]  # fmt: skip
    if refused:
        raise TypeError(f"parameters of a dtype that cannot be summed: {', '.join(refused[:5])}")
