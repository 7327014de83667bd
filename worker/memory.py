"""Which memory belongs to rounds that are open (V2).

Rule: memory is not pushed again while a round of its name is open, and is never shared by two open
rounds of which one writes to it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradsum.errors import UsageError
from gradsum.worker.face import Handle


class _Use(NamedTuple):
    name: str
    span: range
    writes: bool
    handle: Handle | None


class _List(NamedTuple):
    """Tensors that one round writes to."""

    places: frozenset[int]
    tensors: tuple[torch.Tensor, ...]
    handle: Handle


class OpenMemory:
    """The memory in use by one client's raw calls, by storage."""

    def __init__(self) -> None:
        self._uses: dict[int, list[_Use]] = {}
        self._lists: list[_List] = []
        self._lock = threading.Lock()

    def require_free(self, pairs: Sequence[tuple[str, torch.Tensor]], writes: bool) -> None:
        """UsageError if a tensor's memory is in use by an open round or by another of ``pairs``."""
        with self._lock:
            self._forget_done()
            here: dict[int, list[_Use]] = {}
            for name, tensor in pairs:
                use, place = _Use(name, _span(tensor), writes, None), _storage(tensor)
                for other in self._at(place) + here.get(place, []):
                    _require_apart(use, other)
                here.setdefault(place, []).append(use)

    def require_apart(self, name: str, tensors: Sequence[torch.Tensor], writes: bool) -> None:
        """The same for a list, quickly where no two tensors and no open round share a storage."""
        places = [_storage(tensor) for tensor in tensors]
        with self._lock:
            self._forget_done()
            busy = not self._uses.keys().isdisjoint(places) or any(
                not each.places.isdisjoint(places) for each in self._lists
            )
        if busy or len(set(places)) < len(places):
            self.require_free([(f"{name}.{i}", t) for i, t in enumerate(tensors)], writes)

    def _at(self, place: int) -> list[_Use]:
        """Uses of a storage, those of lists included."""
        return self._uses.get(place, []) + [
            _Use(each.handle.name, _span(tensor), True, each.handle)
            for each in self._lists if place in each.places
            for tensor in each.tensors if _storage(tensor) == place
        ]  # fmt: skip

    def add_all(self, handle: Handle, tensors: Sequence[torch.Tensor]) -> None:
        """Remember the memory of a list that the round of ``handle`` will write to."""
        places = frozenset(_storage(tensor) for tensor in tensors)
        with self._lock:
            self._lists.append(_List(places, tuple(tensors), handle))

    def add(self, name: str, tensor: torch.Tensor, writes: bool, handle: Handle) -> None:
        """Remember the memory until the handle is done."""
        use = _Use(name, _span(tensor), writes, handle)
        with self._lock:
            self._uses.setdefault(_storage(tensor), []).append(use)

    def _forget_done(self) -> None:
        self._lists = [each for each in self._lists if not each.handle.done()]
        for place, uses in list(self._uses.items()):
            rest = [use for use in uses if use.handle is not None and not use.handle.done()]
            if rest:
                self._uses[place] = rest
            else:
                del self._uses[place]


def _require_apart(new: _Use, old: _Use) -> None:
    overlap = new.span.start < old.span.stop and old.span.start < new.span.stop
    if not overlap or not (new.name == old.name or new.writes or old.writes):
        return
    raise UsageError(
        f"tensor {new.name!r} is pushed again while its round is open"
        if new.name == old.name
        else f"tensor {new.name!r} shares memory with {old.name!r}, whose round is open",
        tensor=new.name,
        hint="call synchronize() on the first handle, or push a copy",
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(tensor: torch.Tensor) -> range:
    """Addresses from the first to behind the last element."""
    if not tensor.numel():
        return range(0)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((extent - 1) * stride for extent, stride in steps)
    first, size = tensor.data_ptr(), tensor.element_size()
    return range(first, first + (last + 1) * size)
