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
from gradsum.scheduler.table import TensorSpec
from gradsum.worker.bundle import Bundles, Load
from gradsum.worker.client import Client, Entry
from gradsum.worker.compression import Compressor
from gradsum.worker.face import Handle
from gradsum.worker.marks import marked
from gradsum.worker.sinks import TensorSink
from gradsum.worker.tensors import Watch, dtype_name, require_dense, source_bytes, spec_of

MOST_URGENT: Final = -(2**31)
"""Priority of a raw call that names none: somebody waits for it."""

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
Result: TypeAlias = torch.Tensor | list[torch.Tensor]
Named: TypeAlias = list[tuple[str, torch.Tensor]]


class _Part(NamedTuple):
    """A tensor that travels by itself, and its place in the call's list."""

    place: int
    tensor: torch.Tensor
    watch: Watch
    sink: TensorSink
    handle: Handle


class PushPullHandle:
    """What ``poll`` and ``synchronize`` take. Waiting twice gives the same tensors."""

    def __init__(self, parts: list[_Part], loads: list[Load], many: bool) -> None:
        self._parts = parts
        self._loads = loads
        self._many = many
        self._result: Result | None = None
        self._lock = threading.Lock()

    def poll(self) -> bool:
        """Whether the result is there; True ends the ban on changing the tensors.

        Raises what ended the round, as ``wait`` does.
        """
        if not all(handle.done() for handle in self._handles()):
            return False
        self.wait()
        return True

    def wait(self, timeout: float | None = None) -> Result:
        """The sum or mean; StallTimeout after ``timeout`` seconds."""
        with self._lock:
            if self._result is None:
                results = self._finish(timeout)
                self._result = results if self._many else results[0]
                self._parts, self._loads = [], []
            return self._result

    def _handles(self) -> list[Handle]:
        return [part.handle for part in self._parts] + [load.handle for load in self._loads]

    @marked("gradsum::wait")
    def _finish(self, timeout: float | None) -> list[torch.Tensor]:
        deadline = None if timeout is None else time.monotonic() + timeout
        for handle in self._handles():
            rest = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not handle.wait(rest).present:
                name = handle.name
                raise ProtocolError(f"round of {name!r} ended without a sum", tensor=name)
        for part in self._parts:
            part.watch.require_same(part.tensor, part.handle.name)
        results = {part.place: part.sink.finish() for part in self._parts}
        for load in self._loads:
            results.update(load.finish())
        return [results[place] for place in sorted(results)]


@marked("gradsum::push")
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
    call = _Call(client, average, MOST_URGENT if priority is None else -priority, inplace)
    if not isinstance(tensors, list | tuple):
        pairs = _named(tensors, name)
        client.memory.require_free(pairs, inplace)
        entries = client.enter(_specs(client, name, pairs, compression))
        return PushPullHandle([call.alone(0, entries[0], pairs[0][1])], [], many=False)
    bundles = client.bundles.get((name, compression))
    fits = bundles is not None and bundles.fits(tensors)
    pairs = [] if fits else _named(tensors, name)
    client.memory.require_apart(name or "", tensors, inplace)
    if bundles is None or not fits:
        specs = _specs(client, name, pairs, compression)
        bundles = client.bundles[name, compression] = Bundles(client, specs, tensors, name or "")
    return call.many(bundles, tensors)


def _specs(
    client: Client, name: str | None, pairs: Named, compression: Compressor
) -> list[TensorSpec]:
    policy = client.policy(name or "")
    return [spec_of(each, tensor, policy, 1, _wire(compression, tensor)) for each, tensor in pairs]


class _Call(NamedTuple):
    """What all tensors of one call have in common."""

    client: Client
    average: bool
    urgency: int
    inplace: bool

    def alone(self, place: int, entry: Entry, tensor: torch.Tensor) -> _Part:
        """Begin the round of one tensor."""
        spec = entry.spec
        source = source_bytes(tensor, spec)
        target = (
            tensor if self.inplace
            else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        )  # fmt: skip
        sink = TensorSink(target, spec.wire, self.average)
        watch = Watch(tensor)
        handle = entry.submit(self.client.session, source, sink, self.urgency)
        self.client.memory.add(spec.name, tensor, self.inplace, handle)
        return _Part(place, tensor, watch, sink, handle)

    def many(self, bundles: Bundles, tensors: Sequence[torch.Tensor]) -> PushPullHandle:
        """Begin the rounds of a list, its small tensors in bundles."""
        parts = [self.alone(place, entry, tensors[place]) for place, entry in bundles.alone]
        loads = []
        for bundle in bundles.shared:
            members = [tensors[place] for place in bundle.places]
            load = bundle.begin(
                self.client.session, members, self.average, self.urgency, self.inplace
            )
            if self.inplace:
                self.client.memory.add_all(load.handle, members)
            loads.append(load)
        return PushPullHandle(parts, loads, many=True)


def _named(tensors: Tensors, name: str | None) -> Named:
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
