"""Which slice size, credit window and packing size a job trains fastest with, found while it runs.

Rules: ``step(event, now) -> proposals``; the caller brings a proposal into force by a planned epoch
and says so, and leaves out the step right after it. The median of all others under a setting
counts: the next one is asked for after COUNTED of them, and more follow until its fence comes. The
search ends after a number of points, or when nothing promises a gain; a gain that is small, or
smaller than the noise, is not taken. Afterwards the first steps say what is usual now; when later
ones become slower or faster for good, the search starts anew around what is in force, and forgets
what it knew: it was another link. No I/O.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from gradsum.scheduler.surrogate import Array, Guess, expected_gain, predict

SLICES: Final = tuple(1 << power for power in range(16, 23))
WINDOWS: Final = (2, 4, 8, 16, 32)
PACKS: Final = tuple(1 << power for power in range(18, 23))
"""The grid: bytes of a slice, slices under way, bytes of a shared buffer."""

COUNTED: Final = 2
"""Steps under a setting before the next one is asked for."""

NOISE: Final = 0.01
"""Relative deviation of a step's time, at least: two equal steps prove nothing."""

SPOTS: Final = ((1, 3, 2), (4, 1, 2), (3, 3, 1), (2, 1, 3))
"""Where on the grid a search looks before the model is asked."""

POINTS: Final = 10
AGAIN: Final = 5
"""Points of the first search, and of one after the link has changed."""

WORTH: Final = 0.03
SHIFT: Final = 0.15
LASTING: Final = 3
"""A gain worth a change; a change of the step time that is none by chance, and for how many steps.
"""

USUAL: Final = 5
BROKEN: Final = 0.3
"""Steps after a search that say what is usual from then on, and how much slower than the search saw
they may be: beyond, the link has changed before."""

PAUSE: Final = 10.0
"""Seconds in which a change that was given up is not asked for again."""


class Setting(NamedTuple):
    """What is tuned. Bytes; window is counted in slices."""

    slice_bytes: int
    window: int
    pack_bytes: int


class Took(NamedTuple):
    """``steps`` training steps took ``seconds`` each, by the slowest rank."""

    seconds: float
    steps: int = 1


class Applied(NamedTuple):
    """A setting is in force from here on."""

    setting: Setting


class GivenUp(NamedTuple):
    """What was proposed did not come into force."""


Event = Took | Applied | GivenUp


class State(enum.Enum):
    """Where the tuner stands."""

    SEARCHING = "searching"
    SETTLED = "settled"
    LEFT_ALONE = "left alone"


@dataclass(frozen=True, slots=True)
class Point:
    """A tried setting: its median step time, the deviation of that, and the steps behind it."""

    setting: Setting
    seconds: float
    noise: float
    steps: int


@dataclass(slots=True)
class _Sample:
    """Steps under the setting in force."""

    steps: int = 0
    seconds: list[float] = field(default_factory=list)


GRID: Final = tuple(Setting(*it) for it in itertools.product(SLICES, WINDOWS, PACKS))


class Tuner:
    """One job's search, from the setting that is in force when it starts."""

    __slots__ = (
        "_asked", "_budget", "_chosen", "_current", "_first", "_grid", "_guess", "_not_before",
        "_points", "_recent", "_sample", "_usual", "state",
    )  # fmt: skip

    def __init__(self, current: Setting, guess: Setting | None = None) -> None:
        """guess: what is to be tried first, since it was the best for such a job before."""
        self.state = State.SEARCHING
        self._current = self._first = current
        self._guess = guess
        packs = PACKS if current.pack_bytes else (0,)  # 0: this job is never to pack
        grid = itertools.product(SLICES, WINDOWS, packs)
        self._grid = tuple(itertools.starmap(Setting, grid))
        self._points: dict[Setting, Point] = {}
        self._budget = POINTS
        self._sample = _Sample()
        self._asked: Setting | None = None
        self._not_before = 0.0
        self._recent: deque[float] = deque(maxlen=LASTING)
        self._usual: list[float] = []
        self._chosen: Point | None = None

    @property
    def asked(self) -> bool:
        """Whether a proposal is on its way."""
        return self._asked is not None

    @property
    def points(self) -> tuple[Point, ...]:
        """What was tried, in order."""
        return tuple(self._points.values())

    @property
    def best(self) -> Setting:
        """The tried setting that is most likely the fastest; the one in force before any."""
        if not self._points:
            return self._current
        guess = self.guess(tuple(self._points))
        return list(self._points)[int(np.argmin(guess.mean))]

    @property
    def chosen(self) -> Point:
        """What the last search ended with; only after one."""
        if self._chosen is None:
            raise LookupError("the first search goes on")
        return self._chosen

    def guess(self, settings: tuple[Setting, ...]) -> Guess:
        """Logarithms of the step times that these settings should have; needs a point."""
        points = self.points
        return predict(
            _places(tuple(p.setting for p in points)),
            [math.log(p.seconds) for p in points],
            [p.noise for p in points],
            _places(settings),
        )

    def step(self, event: Event, now: float) -> list[Setting]:
        """Take one event; returns the setting to bring into force, if any."""
        match event:
            case Applied(setting):
                self._current, self._asked, self._sample = setting, None, _Sample()
                self._recent.clear()
                return []
            case GivenUp():
                self._asked, self._not_before = None, now + PAUSE
                return []
            case Took(seconds, steps):
                return self._took(seconds, steps, now)

    def _took(self, seconds: float, steps: int, now: float) -> list[Setting]:
        if not (seconds > 0 and math.isfinite(seconds)) or steps < 1:
            return []
        if self.state is not State.SEARCHING:
            if self._asked is None:
                self._watch(seconds)
            return []
        self._sample.steps += steps
        self._sample.seconds.append(seconds)
        if self._sample.steps < COUNTED or now < self._not_before:
            return []
        self._keep()
        return [] if self._asked is not None else self._ask(self._next())

    def _keep(self) -> None:
        """The sample becomes a point, together with what was seen of this setting before."""
        seconds = sorted(self._sample.seconds)
        middle = median(seconds)
        spread = 1.4826 * median(abs(it - middle) for it in seconds) / middle
        noise = max(spread, NOISE) / math.sqrt(self._sample.steps)
        self._points[self._current] = Point(self._current, middle, noise, self._sample.steps)

    def _next(self) -> Setting:
        """The next setting of the search, or the one that it ends with."""
        tried = len(self._points)
        if tried >= self._budget:
            return self._settle()
        for setting in self._design():
            if setting not in self._points:
                return setting
        rest = tuple(it for it in self._grid if it not in self._points)
        guess, lowest = self.guess(rest), float(self.guess(tuple(self._points)).mean.min())
        if tried == self._budget - 1:  # the last one is no longer to teach anything
            return rest[int(np.argmin(guess.mean))]
        return rest[int(np.argmax(expected_gain(guess, lowest)))]

    def _design(self) -> Iterator[Setting]:
        """Where a search looks first: what was best before, then all over the grid."""
        if self._guess is not None and bool(self._guess.pack_bytes) == bool(self._first.pack_bytes):
            yield self._guess
        for size, window, pack in SPOTS:
            packed = PACKS[pack] if self._first.pack_bytes else 0
            yield Setting(SLICES[size], WINDOWS[window], packed)

    def _settle(self) -> Setting:
        """Take the best if it is worth it, against where the search began."""
        best, first = self._points[self.best], self._points[self._first]
        gain = math.log(first.seconds / best.seconds)
        worth = gain >= max(WORTH, math.hypot(first.noise, best.noise))
        self.state = State.SETTLED if worth else State.LEFT_ALONE
        self._chosen = best if worth else first
        self._usual = []
        return self._chosen.setting

    def _ask(self, setting: Setting) -> list[Setting]:
        if setting == self._current:
            return []
        self._asked = setting
        return [setting]

    def _watch(self, seconds: float) -> None:
        """Begin anew when settled steps have been off the usual time for a while."""
        if len(self._usual) < USUAL:
            self._usual.append(seconds)
            broken = median(self._usual) > (1 + BROKEN) * self.chosen.seconds
            if broken and len(self._usual) == USUAL:
                self._begin_anew()
            return
        self._recent.append(math.log(seconds / median(self._usual)))
        if len(self._recent) < LASTING:
            return
        slower = min(self._recent) > math.log1p(SHIFT)
        faster = max(self._recent) < -math.log1p(SHIFT)
        if slower or faster:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Search around what is in force."""
        self.state = State.SEARCHING
        self._points = {}
        self._first, self._guess = self._current, None
        self._budget = AGAIN
        self._sample = _Sample()
        self._recent.clear()


def _places(settings: tuple[Setting, ...]) -> Array:
    """Logarithms, as shares of the grid's width."""
    low = np.log2(np.asarray(GRID[0], dtype=np.float64))
    high = np.log2(np.asarray(GRID[-1], dtype=np.float64))
    values = np.maximum(np.asarray(settings, dtype=np.float64), 1.0)
    places: Array = (np.log2(values) - low) / (high - low)
    return places
