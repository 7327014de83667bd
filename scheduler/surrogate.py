"""What a few noisy measurements say about settings nobody has tried: a Gaussian process.

Rules: inputs lie in the unit cube, values are logarithms of times, smaller is better. The kernel is
Matern 5/2; its length in each direction is the most likely of a few, so that what does not matter
costs no points, and a handful of points cannot overfit. Equal points give equal answers, nothing
is random. No I/O.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LENGTHS: Final = tuple(itertools.product((0.4, 0.8, 1.6, 4.0), repeat=3))
JITTER: Final = 1e-4
"""Lengths that are tried; what is added to the diagonal, of values with deviation 1."""


class Guess(NamedTuple):
    """Mean and standard deviation of each point."""

    mean: Array
    deviation: Array


def predict(tried: Array, values: Sequence[float], noise: Sequence[float], at: Array) -> Guess:
    """The posterior at the rows of ``at``; noise: the standard deviation of each value."""
    y = np.asarray(values, dtype=np.float64)
    centre = float(y.mean())
    scale = max(float(y.std()), float(np.median(noise)), 1e-3)
    errors = np.diag((np.asarray(noise) / scale) ** 2 + JITTER)
    y = (y - centre) / scale
    length = max(LENGTHS, key=lambda it: _likelihood(_kernel(tried, tried, it) + errors, y))
    factor = np.linalg.cholesky(_kernel(tried, tried, length) + errors)
    cross = np.linalg.solve(factor, _kernel(tried, at, length))
    mean = cross.T @ np.linalg.solve(factor, y)
    variance = np.maximum(1.0 - (cross**2).sum(axis=0), 1e-12)
    return Guess(mean * scale + centre, np.sqrt(variance) * scale)


def expected_gain(guess: Guess, best: float) -> Array:
    """By how much each point is expected to fall below ``best``."""
    z = (best - guess.mean) / guess.deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * math.erfc(-it / math.sqrt(2)) for it in z])
    gain: Any = guess.deviation * (z * below + density)
    return np.asarray(gain, dtype=np.float64)


def _kernel(one: Array, other: Array, lengths: Sequence[float]) -> Array:
    gaps = (one[:, None, :] - other[None, :, :]) / np.asarray(lengths)
    r = math.sqrt(5) * np.sqrt((gaps**2).sum(axis=2))
    covariance: Array = (1 + r + r**2 / 3) * np.exp(-r)
    return covariance


def _likelihood(covariance: Array, y: Array) -> float:
    factor = np.linalg.cholesky(covariance)
    fit = float((np.linalg.solve(factor, y) ** 2).sum())
    return -0.5 * fit - float(np.log(np.diag(factor)).sum())
