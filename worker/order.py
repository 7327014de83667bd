"""The order in which a model's forward pass needs its parameters (DESIGN 6).

The sum of what the next forward pass needs first should arrive first. Learnt once, from the first
forward pass, by hooks that remove themselves.
"""

from __future__ import annotations

from typing import Any

import torch


class ForwardOrder:
    """Parameters in the order of their module's first call."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._positions: dict[int, int] = {}
        self._hooks: dict[int, Any] = {}
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                self._hooks[id(module)] = module.register_forward_pre_hook(self._called)

    def _called(self, module: torch.nn.Module, _inputs: object) -> None:
        hook = self._hooks.pop(id(module), None)
        if hook is not None:
            hook.remove()
        for parameter in module.parameters(recurse=False):
            self._positions.setdefault(id(parameter), len(self._positions))

    def end(self) -> None:
        """The first window is over: modules that were never called keep no hook."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def position(self, parameter: torch.Tensor) -> int | None:
        """0 for what is needed first; None for a parameter that was not needed."""
        return self._positions.get(id(parameter))
