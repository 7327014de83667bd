"""Marks: names that torch's profiler shows around gradsum's calls.

``record_function`` costs microseconds even when nobody profiles, so it is entered only while a
profiler runs; else a mark is one look at torch's own flag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch.autograd.profiler

P = ParamSpec("P")
R = TypeVar("R")


def marked(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show calls of the decorated function as ``name`` in profiles."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch.autograd.profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with torch.autograd.profiler.record_function(name):
                return function(*args, **kwargs)

        return call

    return decorate
