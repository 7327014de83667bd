"""Which module reads which parameter: where a forward pass waits for late updates (DESIGN 6).

Rules: a module waits for its own parameters when it is entered. Other readers are learnt until the
first window ends: a torch function mode sees a weight that is used inside another module than its
own, and that module waits for it too. What nobody was seen to read is waited for where the model is
entered; so is everything when the model is in evaluation mode. A compiled module is one reader.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from gradsum.worker.order import ForwardOrder

Seen = Callable[[torch.nn.Module], None]
Need = Callable[[Iterable[torch.Tensor]], None]

_LOOKS: Final = frozenset(
    "dim size stride numel ndim shape dtype device layout is_cuda is_leaf is_sparse requires_grad "
    "is_floating_point is_complex grad grad_fn data_ptr storage_offset nbytes itemsize name "
    "element_size is_contiguous names output_nr".split()
)
"""What tells of a tensor without reading its values."""


class Readers(ForwardOrder):
    """need: makes the update of some parameters; settle: makes all that are due."""

    def __init__(self, model: torch.nn.Module, need: Need, settle: Callable[[], None]) -> None:
        super().__init__(model)
        self._need = need
        self._settle = settle
        self._modules = list(_readers(model))
        self._own = {id(module): own for module, own in self._modules}
        self._foreign: dict[int, dict[int, torch.Tensor]] = {}
        self._used: set[int] = set()
        self._entries: set[int] = {id(model)}
        self._unread: list[torch.Tensor] = []
        self._inside: list[torch.nn.Module] = []
        self._uses: _Uses | None = None
        self._compiled = any(_is_compiled(module) for module in model.modules())
        self._learning: list[Any] = []
        self.entered: Seen = torch.compiler.disable(self._entered)
        self.left: Seen = torch.compiler.disable(self._left)
        self._watch(model)

    def _watch(self, model: torch.nn.Module) -> None:
        myself = weakref.ref(self)
        for module, _ in self._modules:
            module.register_forward_pre_hook(Entrance(myself), prepend=True)
            left = Exit(myself)
            self._learning.append(module.register_forward_hook(left, always_call=True))
        for module in model.modules():
            module.register_state_dict_pre_hook(Settled(myself))

    # -- a forward pass ----------------------------------------------------------------------

    def _entered(self, module: torch.nn.Module) -> None:
        """The parameters that ``module`` reads are needed now."""
        if self._learning:
            self._learn(module)
        if id(module) in self._entries:
            if not module.training:
                self._settle()
            self._need(self._unread)
        self._need(self._own[id(module)]())
        foreign = self._foreign.get(id(module))
        if foreign:
            self._need(foreign.values())

    def settle(self) -> None:
        """Somebody reads everything."""
        self._settle()

    # -- learning ----------------------------------------------------------------------------

    def _learn(self, module: torch.nn.Module) -> None:
        self._used.update(id(parameter) for parameter in self._own[id(module)]())
        if not self._inside:
            self._entries.add(id(module))
            if not self._compiled:
                self._uses = _Uses(self._noticed)
                self._uses.__enter__()  # type: ignore[no-untyped-call]
        self._inside.append(module)

    def _left(self, module: torch.nn.Module) -> None:
        """A module's forward is over, by return or by an exception."""
        while self._inside and self._inside.pop() is not module:
            pass  # modules whose exit was not seen
        if not self._inside and self._uses is not None:
            self._uses.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._uses = None

    def _noticed(self, parameter: torch.Tensor) -> None:
        """A parameter is used inside the module that was entered last."""
        reader = self._inside[-1]
        self._used.add(id(parameter))
        if all(parameter is not own for own in self._own[id(reader)]()):
            self._foreign.setdefault(id(reader), {})[id(parameter)] = parameter

    def end(self) -> None:
        """The first window is over: what was not seen by now waits at the entries."""
        super().end()
        for hook in self._learning:
            hook.remove()
        self._learning.clear()
        self._inside.clear()
        every = (parameter for _, own in self._modules for parameter in own())
        self._unread = [parameter for parameter in every if id(parameter) not in self._used]


class _Hook:
    """A hook that dies with its readers; in a copy or a pickle of the model it does nothing."""

    __slots__ = ("_readers",)

    def __init__(self, readers: weakref.ref[Readers] | None = None) -> None:
        self._readers = readers

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def alive(self) -> Readers | None:
        """The readers, while their optimizer lives."""
        return None if self._readers is None else self._readers()


class Entrance(_Hook):
    """Before a module's forward."""

    __slots__ = ()

    def __call__(self, module: torch.nn.Module, _inputs: object) -> None:
        readers = self.alive()
        if readers is not None:
            readers.entered(module)


class Exit(_Hook):
    """After a module's forward, while readers are learnt."""

    __slots__ = ()

    def __call__(self, module: torch.nn.Module, _inputs: object, _outputs: object) -> None:
        readers = self.alive()
        if readers is not None:
            readers.left(module)


class Settled(_Hook):
    """Before a module's state_dict."""

    __slots__ = ()

    def __call__(self, *_about: object) -> None:
        readers = self.alive()
        if readers is not None:
            readers.settle()


class _Uses(TorchFunctionMode):
    """Tells of every parameter whose values a torch function reads."""

    def __init__(self, noticed: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._noticed = noticed

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in _LOOKS:
            for parameter in _parameters((args, given)):
                self._noticed(parameter)
        return func(*args, **given)


def _parameters(node: Any) -> Iterator[torch.nn.Parameter]:
    if isinstance(node, torch.nn.Parameter):
        yield node
    elif isinstance(node, tuple | list):
        for child in node:
            yield from _parameters(child)
    elif isinstance(node, dict):
        yield from _parameters(tuple(node.values()))


def _is_compiled(module: torch.nn.Module) -> bool:
    inner = isinstance(getattr(module, "_orig_mod", None), torch.nn.Module)
    return inner or getattr(module, "_compiled_call_impl", None) is not None


def _own(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Its parameters, and those of lists and dicts of parameters, which are never called."""
    held = [p for p in module._parameters.values() if p is not None]
    for child in module.children():
        if isinstance(child, torch.nn.ParameterList | torch.nn.ParameterDict):
            held += child.parameters()
    return held


def _readers(
    module: torch.nn.Module, seen: set[int] | None = None
) -> Iterator[tuple[torch.nn.Module, Callable[[], list[torch.nn.Parameter]]]]:
    """Each module and a function for what it reads itself; nothing inside a compiled module."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if _is_compiled(module):
        yield module, lambda: list(module.parameters())
        return
    yield module, lambda: _own(module)
    for child in module.children():
        yield from _readers(child, seen)
