"""Tuning of one job: step times go to the tuner, what it proposes becomes a planned epoch.

Rules: the search begins once the rule for links has had its say, or has nothing to go by; what an
earlier job of the same kind found is tried first. Nothing is asked for while a fence is asked for
or open; until the tuner's own fence comes, steps go on counting for what is in force. A plan that
others have asked for is one more setting that is in force.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from gradsum.proto.control import PlanMessage
from gradsum.scheduler.credit import IN_WINDOW
from gradsum.scheduler.fence import Change
from gradsum.scheduler.pace import Paces, Passed
from gradsum.scheduler.record import Record
from gradsum.scheduler.tuner import Applied, GivenUp, Setting, State, Took, Tuner

PATIENCE: Final = 10
"""Samples after which the search begins although some link has not been measured."""


class Tuning:
    """The tuner of a job, once it has begun, and what it is fed."""

    __slots__ = ("_current", "_learnt", "_now", "_paces", "_told", "_tuner", "_waited")

    def __init__(self, learnt: Mapping[str, Setting], plan: PlanMessage) -> None:
        self._learnt = learnt
        self._current = _setting(plan)
        self._paces = Paces()
        self._tuner: Tuner | None = None
        self._told = False
        self._waited = 0
        self._now = 0.0

    @property
    def begun(self) -> bool:
        """Whether the search has begun: from here on it alone changes slices."""
        return self._tuner is not None

    def sample(self, passed: Mapping[int, Passed | None], *, busy: bool) -> Took | None:
        """The steps that all ranks have taken since the last sample, if they count."""
        took = self._paces.take(passed)
        return None if busy and not (self._tuner is not None and self._tuner.asked) else took

    def look(self, took: Took, now: float, fingerprint: str, *, ready: bool) -> Change | None:
        """Take a sample; returns what to change, if anything. ready: all links are measured."""
        self._now = now
        if self._tuner is None:
            self._waited += 1
            if not ready and self._waited < PATIENCE:
                return None
            self._tuner = Tuner(self._current, self._learnt.get(fingerprint))
        for setting in self._tuner.step(took, now):
            return Change(setting.slice_bytes, setting.pack_bytes, setting.window)
        return None

    def adopted(self, plan: PlanMessage) -> None:
        """A plan is in force; what all ranks did at its fence says nothing about it."""
        self._current = _setting(plan)
        self._paces.reset(plan.step + 1)
        if self._tuner is not None:
            self._tuner.step(Applied(self._current), self._now)

    def given_up(self, step: int) -> None:
        """The fence at ``step`` was given up; some ranks have stood there."""
        self._paces.reset(step + 1)
        if self._tuner is not None:
            self._tuner.step(GivenUp(), self._now)

    def news(self, fingerprint: str) -> Record | None:
        """What is worth keeping, once after each search."""
        tuner = self._tuner
        if tuner is None or tuner.state is State.SEARCHING:
            self._told = False
            return None
        if self._told:
            return None
        self._told = True
        chosen = tuner.chosen
        return Record(
            fingerprint, chosen.setting, chosen.seconds, tuner.state.value, len(tuner.points)
        )

    def picture(self) -> dict[str, Any]:
        """For the status: every setting that was tried, and what the model makes of it."""
        tuner = self._tuner
        if tuner is None:
            return {"state": "waiting", "current": self._current._asdict(), "best": None,
                    "points": []}  # fmt: skip
        points = tuner.points
        entries: list[dict[str, Any]] = []
        if points:
            guess = tuner.guess(tuple(point.setting for point in points))
            for point, mean, deviation in zip(points, guess.mean, guess.deviation, strict=True):
                predicted = math.exp(mean)
                entries.append(
                    {**point.setting._asdict(), "seconds": point.seconds, "steps": point.steps,
                     "predicted": predicted, "deviation": predicted * float(deviation)}
                )  # fmt: skip
        return {
            "state": tuner.state.value,
            "current": self._current._asdict(),
            "best": tuner.best._asdict() if points else None,
            "points": entries,
        }


def _setting(plan: PlanMessage) -> Setting:
    return Setting(plan.slice_bytes, plan.window or IN_WINDOW, plan.pack_bytes)
