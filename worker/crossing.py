"""Cross-barrier: the steps that are made when their sums arrive (ByteScheduler, section 3).

``step()`` only ends the window. Each parameter's step is made before the next forward pass reads
it, with the options its group had at ``step()``; all in the training thread, so that the user's
code never sees a parameter change under its hands. While it waits for one sum it makes the steps of
others that are in. A gradient that reaches a parameter whose step is due shows that somebody read
it too early: an error, never a stale weight.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradsum.worker.parameters import Round

Group = dict[str, Any]
Make = Callable[[list[Group]], None]


class After(enum.Enum):
    """What becomes of a gradient when its step has been made."""

    KEPT = "kept"
    NONE = "none"
    ZERO = "zero"


class Options:
    """One group's options as they were at ``step()``, and the group itself."""

    __slots__ = ("_then", "live")

    def __init__(self, live: Group) -> None:
        self.live = live
        self._then = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in live.items() if key != "params"
        }  # fmt: skip

    def group(self, parameters: list[torch.Tensor]) -> Group:
        """A group of some of the parameters, for the optimizer's own step."""
        return {"params": parameters, **self._then}

    def keep(self, used: Group) -> None:
        """What the step wrote into its group, such as a count of steps, is the group's now."""
        for key, value in used.items():
            if key != "params" and self._then.get(key) is not value:
                self.live[key] = value


class Due:
    """One parameter's step that waits for its sum."""

    __slots__ = ("after", "options", "round")

    def __init__(self, round_: Round, options: Options) -> None:
        self.round = round_
        self.options = options
        self.after = After.KEPT


class Crossing:
    """The steps of one optimizer that are due.

    make: the inner optimizer's step over some groups. Waits raise what ended the round, or
    StallTimeout.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._due: dict[int, Due] = {}

    def begin(self, rounds: Iterable[Round], groups: list[Group]) -> None:
        """``step()``: these rounds' steps are due, in the order in which they are needed."""
        options = {id(p): kept for kept in map(Options, groups) for p in kept.live["params"]}
        for round_ in sorted(rounds, key=lambda r: r.urgency):
            key = id(round_.tracked.parameter)
            if key in options:  # else the user took it out of its group: nobody steps
                round_.tracked.awaited = True
                self._due[key] = Due(round_, options[key])

    def need(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make the steps of ``parameters`` that are due; waits for their sums."""
        if not self._due:
            return
        wanted = [id(p) for p in parameters if id(p) in self._due]
        for key in wanted:
            if key in self._due:
                self._await(key)
                self._finish([k for k in wanted if k in self._due and self._due[k].round.done])

    def settle(self) -> None:
        """Make all steps that are due."""
        while self._due:
            self._await(next(iter(self._due)))
            self._finish([key for key, due in self._due.items() if due.round.done])

    def cleared(self, set_to_none: bool) -> None:
        """``zero_grad``: gradients whose sums are on the way are cleared after their steps."""
        for due in self._due.values():
            due.after = After.NONE if set_to_none else After.ZERO
            due.round.tracked.parameter.grad = None

    def _await(self, key: int) -> None:
        """Wait for one sum, and use the time."""
        round_ = self._due[key].round
        while not round_.done:
            ready = next((k for k, due in self._due.items() if due.round.done), None)
            if ready is None:
                round_.wait()
                return
            self._finish([ready])

    def _finish(self, keys: list[int]) -> None:
        """Make the steps of parameters whose sums are in. One that fails is not tried again."""
        given = []
        for key in keys:
            due = self._due.pop(key)
            due.round.tracked.awaited = False
            if due.round.wait():
                given.append((due, due.round.mean(), due.round.tracked.parameter.grad))
        for due, mean, _ in given:
            due.round.tracked.parameter.grad = mean
        try:
            self._step([due for due, _, _ in given])
        finally:
            for due, mean, found in given:
                _leave(due, mean, found)

    def _step(self, due: list[Due]) -> None:
        by_options: dict[int, list[Due]] = {}
        for each in due:
            by_options.setdefault(id(each.options), []).append(each)
        groups = [
            (same[0].options, same[0].options.group([d.round.tracked.parameter for d in same]))
            for same in by_options.values()
        ]
        if groups:
            self._make([group for _, group in groups])
        for options, used in groups:
            options.keep(used)


def _leave(due: Due, mean: torch.Tensor, found: torch.Tensor | None) -> None:
    """The gradient after the step: what ``zero_grad`` or the user made of it meanwhile."""
    if due.after is After.ZERO and found is None:
        mean.zero_()
    elif due.after is not After.KEPT or found is None or found is not due.round.grad:
        due.round.tracked.parameter.grad = found
    due.round.tracked.remember()
