"""Tests of PyTorch's that pass with gloo and cannot pass with gradsum, and why."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

EXCEPTIONS: Final[Mapping[str, str]] = MappingProxyType({})
