"""push_pull: the sum or mean of one tensor, or of a list of them, over all ranks.

Rules: the round of a name is its call count (V2); memory whose round is open is not pushed again
and not changed; results are owned by torch, detached and of the input's dtype, shape and device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import torch

from gradsum.errors import ProtocolError, UsageError
from gradsum.worker.client import Client, Entry
from gradsum.worker.compression import Compressor
from gradsum.worker.face import Handle
from gradsum.worker.sinks import TensorSink
from gradsum.worker.tensors import Watch, dtype_name, require_dense, source_bytes, spec_of

MOST_URGENT: Final = -(2**31)
"""Priority of a raw call that names none: somebody waits for it."""

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
Result: TypeAlias = torch.Tensor | list[torch.Tensor]


class _Part(NamedTuple):
    """One tensor of a call."""

    name: str
    tensor: torch.Tensor
    watch: Watch
    sink: TensorSink
    handle: Handle


class PushPullHandle:
    """What ``poll`` and ``synchronize`` take. Waiting twice gives the same tensors."""

    def __init__(self, parts: list[_Part], many: bool) -> None:
        self._parts = parts
        self._many = many
        self._result: Result | None = None
        self._lock = threading.Lock()

    def poll(self) -> bool:
        """Whether the result is there; True ends the ban on changing the tensors.

        Raises what ended the round, as ``wait`` does.
        """
        if not all(part.handle.done() for part in self._parts):
            return False
        self.wait()
        return True

    def wait(self, timeout: float | None = None) -> Result:
        """The sum or mean; StallTimeout after ``timeout`` seconds."""
        with self._lock:
            if self._result is None:
                results = self._finish(timeout)
                self._result = results if self._many else results[0]
                self._parts = []
            return self._result

    def _finish(self, timeout: float | None) -> list[torch.Tensor]:
        deadline = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            rest = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not part.handle.wait(rest).present:
                raise ProtocolError(f"round of {part.name!r} ended without a sum", tensor=part.name)
        for part in self._parts:
            part.watch.require_same(part.tensor, part.name)
        return [part.sink.finish() for part in self._parts]


def start(
    client: Client,
    tensors: Tensors,
    *,
    name: str | None,
    average: bool,
    priority: int | None,
    compression: Compressor,
    inplace: bool,
) -> PushPullHandle:
    """Begin the rounds of all tensors together; a list's names are ``name.0``, ``name.1``, ..."""
    client.session.check()
    single = isinstance(tensors, torch.Tensor)
    pairs = _named(tensors, name)
    policy = client.policy(name or "")
    specs = [spec_of(each, tensor, policy, 1, _wire(compression, tensor)) for each, tensor in pairs]
    client.memory.require_free(pairs, inplace)
    entries = client.enter(specs)
    urgency = MOST_URGENT if priority is None else -priority
    parts = [
        _begin(client, entry, tensor, average, urgency, inplace)
        for entry, (_, tensor) in zip(entries, pairs, strict=True)
    ]
    return PushPullHandle(parts, many=not single)


def _named(tensors: Tensors, name: str | None) -> list[tuple[str, torch.Tensor]]:
    if not name:
        raise UsageError(
            "push_pull needs a name",
            hint="names make tensors known to the other ranks: push_pull(loss, name='loss')",
        )
    if isinstance(tensors, list | tuple):
        return [(f"{name}.{i}", require_dense(t, f"{name}.{i}")) for i, t in enumerate(tensors)]
    return [(name, require_dense(tensors, name))]


def _wire(compression: Compressor, tensor: torch.Tensor) -> str | None:
    wire = compression.wire_for(tensor)
    return dtype_name(wire) if wire is not None else None


def _begin(
    client: Client,
    entry: Entry,
    tensor: torch.Tensor,
    average: bool,
    urgency: int,
    inplace: bool,
) -> _Part:
    spec = entry.spec
    source = source_bytes(tensor, spec)
    target = (
        tensor if inplace else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    )
    sink = TensorSink(target, spec.wire, average)
    watch = Watch(tensor)
    handle = entry.submit(client.session, source, sink, urgency)
    client.memory.add(spec.name, tensor, inplace, handle)
    return _Part(spec.name, tensor, watch, sink, handle)
