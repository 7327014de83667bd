"""What each parameter of an optimizer is called on all ranks.

Rules: names come from ``named_parameters``, else from the model, else from the place in
``param_groups``; a compiled model's prefix is dropped, so compiled and plain ranks agree (C44);
``named_parameters`` may name more than the optimizer holds (C40), never less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gradsum.errors import UsageError


def plain_name(name: str) -> str:
    """A parameter's name without the prefix of torch.compile."""
    return name.replace("_orig_mod.", "")


def is_pair(item: object) -> bool:
    """Whether the item is a (name, something) pair."""
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)


class Naming:
    """Names for one optimizer's parameters, now and after ``add_param_group``."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        named: Iterable[tuple[str, torch.Tensor]] | None,
        model: torch.nn.Module | None,
    ) -> None:
        self._model = model
        self._in_model = {id(p) for p in model.parameters()} if model else set()
        if named is None and model is not None:
            named = model.named_parameters()
        self._by_place = named is None
        self._names: dict[int, str] = {}
        self._held: list[torch.Tensor] = []  # keeps the ids valid
        self._used: dict[str, torch.Tensor] = {}
        self._handed: set[int] = set()
        for name, parameter in _checked(named or ()):
            self._names.setdefault(id(parameter), name)
            self._held.append(parameter)
        self._require_all_named(groups)

    def _require_all_named(self, groups: list[dict[str, Any]]) -> None:
        places = [place for place, p in _places(groups) if not self._name(place, p)]
        if places:
            raise UsageError(
                f"{len(places)} parameters of the optimizer have no name: {_few(places)}",
                hint="pass named_parameters=model.named_parameters() of the whole model, or model=",
            )

    def _name(self, place: str, parameter: torch.Tensor) -> str | None:
        if self._by_place:
            return place
        found = self._names.get(id(parameter))
        if found is None and self._model is not None:
            self._held.append(parameter)
            named = {id(p): plain_name(n) for n, p in self._model.named_parameters()}
            found = named.get(id(parameter))
            if found is not None:
                self._names[id(parameter)] = found
        return found

    def fresh(self, groups: list[dict[str, Any]]) -> list[tuple[str, torch.Tensor]]:
        """Parameters not handed out before, in the order of their names' list.

        A parameter that took another's place comes under the old name (C68).
        """
        places = list(_places(groups))
        if all(id(p) in self._handed for _, p in places):
            return []
        self._require_all_named(groups)
        found = {str(self._name(place, p)): p for place, p in places}
        if not self._by_place:
            rank = {name: i for i, name in enumerate(self._names.values())}
            found = {name: found[name] for name in sorted(found, key=rank.__getitem__)}
        new = [(name, p) for name, p in found.items() if self._used.get(name) is not p]
        self._used.update(new)
        self._handed = {id(p) for p in self._used.values()}
        return new

    def require_current(self) -> None:
        """UsageError if parameters of the model are no longer in it (C68)."""
        if self._model is None:
            return
        now = {id(p) for p in self._model.parameters()}
        lost = [n for n, p in self._used.items() if id(p) in self._in_model and id(p) not in now]
        if lost:
            raise UsageError(
                f"{len(lost)} parameters were replaced after wrapping: {_few(lost)}",
                hint="the optimizer still holds the old ones: make a new optimizer and wrap it",
            )


def _checked(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[str] = set()
    for item in named:
        if not is_pair(item):
            raise TypeError(
                "named_parameters holds pairs of name and parameter: "
                "pass model.named_parameters(), not model.parameters()"
            )
        name = plain_name(item[0])
        if name in seen:
            raise ValueError(f"named_parameters names {name!r} twice: give each model a prefix")
        seen.add(name)
        yield name, item[1]


def _places(groups: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for g, group in enumerate(groups):
        for i, parameter in enumerate(group["params"]):
            yield f"group{g}.{i}", parameter


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
