"""Make all ranks hold what the root holds: parameters, optimizer state, Python values.

Rules: bits travel, not sums, so every dtype and every NaN arrives as it was; all tensors are in
flight together; tensors are overwritten in place, strides kept; parameter values move only where
they are asked to (C26); names and shapes that differ are a MismatchError on every rank (I1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch

from gradsum.errors import MismatchError, UsageError
from gradsum.scheduler.policy import BROADCAST, Policy
from gradsum.worker.client import Client
from gradsum.worker.face import Handle
from gradsum.worker.naming import is_pair, plain_name
from gradsum.worker.objects import decode, encode
from gradsum.worker.pushpull import MOST_URGENT
from gradsum.worker.sinks import BitSink
from gradsum.worker.tensors import dtype_name, host_copy, require_dense, spec_of, wire_bytes

Named: TypeAlias = Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]]


def parameters(client: Client, params: Named, root: int = 0, prefix: str = "Parameter.") -> None:
    """Overwrite the tensors of ``params`` with the root's, in place.

    params: a state_dict, a dict, ``named_parameters()`` or a list of (name, tensor) pairs.
    """
    client.session.check()
    client.settle()
    _require_rank(client, root)
    tensors(client, [(f"{prefix}{name}", tensor) for name, tensor in _pairs(params)], root)


def tensors(client: Client, pairs: list[tuple[str, torch.Tensor]], root: int) -> None:
    """Broadcast named tensors, all in flight together."""
    begin(client, pairs, root).wait()


class Flight:
    """Broadcasts that are on their way."""

    def __init__(self, parts: list[tuple[Handle, BitSink | None]]) -> None:
        self._parts = parts

    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return all(handle.done() for handle, _ in self._parts)

    def wait(self) -> None:
        """Until the root has handed everything over, and the others have it."""
        for handle, _ in self._parts:
            handle.wait()
        for _, target in self._parts:
            if target is not None:
                target.finish()


def begin(client: Client, pairs: list[tuple[str, torch.Tensor]], root: int) -> Flight:
    """Begin to broadcast named tensors."""
    policy = Policy(kind=BROADCAST, root=root)
    specs = [client.fitting(spec_of(f"broadcast/{root}/{name}", t, policy)) for name, t in pairs]
    entries = client.enter(specs)
    flight: list[tuple[Handle, BitSink | None]] = []
    for urgency, (entry, (_, tensor)) in enumerate(zip(entries, pairs, strict=True)):
        if client.session.rank == root:
            source = wire_bytes(host_copy(tensor))
            flight.append((entry.submit(client.session, source, None, MOST_URGENT + urgency), None))
        else:
            sink = BitSink(tensor)
            flight.append((entry.submit(client.session, None, sink, MOST_URGENT + urgency), sink))
    return Flight(flight)


def value(client: Client, obj: Any, root: int = 0, name: str | None = None) -> Any:
    """The root's ``obj`` on every rank; the others' argument is ignored. TypeError at the root for
    a type that does not travel (worker/objects.py lists those that do)."""
    client.session.check()
    _require_rank(client, root)
    am_root = client.session.rank == root
    data = encode(obj) if am_root else b""
    size = torch.tensor(len(data), dtype=torch.int64)
    place = f"object/{name or 'value'}"
    tensors(client, [(f"{place}/size", size)], root)
    length = int(size)
    capacity = 1 << max(length - 1, 0).bit_length()
    room = torch.zeros(capacity, dtype=torch.uint8)
    if am_root:
        wire_bytes(room)[:length] = data
    tensors(client, [(f"{place}/{capacity}", room)], root)
    return obj if am_root else decode(wire_bytes(room)[:length])


def optimizer_state(client: Client, optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Give every rank the root's optimizer state: tensors, numbers, learning rates.

    No step is made and no parameter changes. MismatchError if the ranks' parameter groups differ.
    """
    client.session.check()
    _require_rank(client, root)
    am_root = client.session.rank == root
    own = optimizer.state_dict()
    found: list[torch.Tensor] = []
    plan = _lift(own, found) if am_root else None
    plan = value(client, plan, root, "optimizer state")
    specs = [(t.dtype, tuple(t.shape)) for t in found] if am_root else _specs(plan)
    held = found if am_root else [torch.empty(shape, dtype=dtype) for dtype, shape in specs]
    tensors(client, [(f"state/{i}", tensor) for i, tensor in enumerate(held)], root)
    if not am_root:
        state = _lower(plan, iter(held))
        _require_same_groups(own, state)
        optimizer.load_state_dict(state)


def _pairs(params: Named) -> list[tuple[str, torch.Tensor]]:
    items = params.items() if isinstance(params, Mapping) else params
    pairs: dict[str, torch.Tensor] = {}
    for item in items:
        if not is_pair(item):
            raise TypeError(
                "broadcast_parameters takes names and tensors: a state_dict, "
                "model.named_parameters() or a list of (name, tensor)"
            )
        name = plain_name(item[0])
        if name in pairs:
            raise ValueError(f"broadcast_parameters got the name {name!r} twice")
        if item[1] is not None:
            pairs[name] = require_dense(item[1], name)
    return list(pairs.items())


def _lift(node: Any, found: list[torch.Tensor]) -> Any:
    """The structure with each tensor replaced by a marker; the tensors go to ``found``."""
    if isinstance(node, torch.Tensor):
        found.append(node)
        return ("tensor", dtype_name(node.dtype), tuple(node.shape))
    if isinstance(node, dict):
        return ("dict", [(key, _lift(child, found)) for key, child in node.items()])
    if isinstance(node, list | tuple):
        tag = "list" if isinstance(node, list) else "tuple"
        return (tag, [_lift(child, found) for child in node])
    return ("value", node)


def _specs(plan: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of each marker, in order."""
    tag, *rest = plan
    if tag == "tensor":
        return [(getattr(torch, rest[0]), rest[1])]
    if tag == "dict":
        return [spec for _, child in rest[0] for spec in _specs(child)]
    return [s for child in rest[0] for s in _specs(child)] if tag in ("list", "tuple") else []


def _lower(plan: Any, found: Any) -> Any:
    """The structure again, with the tensors of ``found`` in the markers' places."""
    tag, *rest = plan
    if tag == "tensor":
        return next(found)
    if tag == "value":
        return rest[0]
    if tag == "dict":
        return {key: _lower(child, found) for key, child in rest[0]}
    children = [_lower(child, found) for child in rest[0]]
    return children if tag == "list" else tuple(children)


def _require_same_groups(own: dict[str, Any], state: dict[str, Any]) -> None:
    here = [len(group["params"]) for group in own["param_groups"]]
    there = [len(group["params"]) for group in state["param_groups"]]
    if here != there:
        raise MismatchError(
            f"optimizer groups have {here} parameters here, {there} on the root",
            hint="build the same optimizer on every rank",
        )


def _require_rank(client: Client, root: int) -> None:
    if not 0 <= root < client.session.size:
        raise UsageError(f"root_rank={root}, but ranks are 0 to {client.session.size - 1}")
