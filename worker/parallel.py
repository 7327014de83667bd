"""DistributedDataParallel with BytePS's face: gradients are means over the ranks when backward()
returns, for any optimizer.

Rules: a window is a backward pass outside of ``no_sync``; it ends when the pass in which the
module's outputs got their gradients ends, not a pass inside of it (activation checkpointing).
Parameters that no pass reached are ABSENT. Weights are rank 0's from the beginning; buffers, such
as running means, before each forward pass in training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import Variable

from gradsum.errors import UsageError
from gradsum.worker import broadcast
from gradsum.worker.client import Client
from gradsum.worker.compression import Compressor
from gradsum.worker.gradients import Gradients
from gradsum.worker.naming import Naming
from gradsum.worker.order import ForwardOrder


class Parallel(torch.nn.Module):
    """``module``, trained on all ranks together. Blocks until every rank has wrapped it."""

    def __init__(
        self, client: Client, module: torch.nn.Module, broadcast_buffers: bool,
        compressor: Compressor,
    ) -> None:  # fmt: skip
        super().__init__()
        client.session.check()
        if not any(p.requires_grad for p in module.parameters()):
            raise UsageError(
                "the module has no parameter that needs a gradient",
                hint="use it without DistributedDataParallel",
            )
        self.module = module
        self._client = client
        self._buffered = broadcast_buffers
        naming = Naming(self._groups(), None, module)
        self._gradients = Gradients(client, naming, compressor, 1, ForwardOrder(module))
        self._prefix = f"{self._gradients.group}/"
        self._closing = False
        self._holding = 0
        broadcast.parameters(client, module.state_dict(), 0, self._prefix)
        self._gradients.adopt(self._groups())

    def _groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.module.parameters())}]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, after its buffers have become rank 0's."""
        if self._buffered and self.training and torch.is_grad_enabled():
            buffers = [(f"{self._prefix}{name}", b) for name, b in self.module.named_buffers()]
            broadcast.tensors(self._client, buffers, 0)
        out = self.module(*args, **kwargs)
        for tensor in _tensors(out):
            if tensor.requires_grad:
                tensor.register_hook(self._begun)
        return out

    def _begun(self, _: torch.Tensor) -> None:
        """A backward pass has reached an output."""
        if not self._holding and not self._closing:
            self._closing = True
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._closing = False
        self.synchronize()

    def synchronize(self) -> None:
        """End the window: every gradient is the mean over the ranks afterwards."""
        self._gradients.close(self._groups())
        self._gradients.stepped()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes inside are added up on this rank only."""
        self._holding += 1
        try:
            with self._gradients.no_sync():
                yield
        finally:
            self._holding -= 1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output, in lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))
