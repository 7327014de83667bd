"""How the text of a setting becomes its value, and the words for what is allowed.

Rules: a kind reads what flags, variables and TOML hand over (str, int, float, bool) and raises
ValueError, TypeError or OverflowError for anything that it does not mean exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

_LARGEST = (1 << 63) - 1
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE]\+?[0-9]{1,2})?)\s*(|K|KiB|M|MiB|G|GiB)")
_UNIT = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")


class Kind(NamedTuple):
    """Reads a raw value; ``allowed`` completes the sentence "it is ..."."""

    metavar: str
    allowed: str
    read: Callable[[Any], Any]


def _integer(raw: Any) -> int:
    """Whole numbers, also written as ``4e6`` or with a unit (powers of 1024)."""
    if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
        raise TypeError(raw)
    match = _SIZE.fullmatch(str(raw).strip())
    if match is None:
        raise ValueError(raw)
    value = Fraction(match[1]) * _UNIT[match[2].removesuffix("iB")]
    if value.denominator != 1:
        raise ValueError(raw)
    return int(value)


def _between(low: int, read: Callable[[Any], int]) -> Callable[[Any], int]:
    def bounded(raw: Any) -> int:
        value = read(raw)
        if not low <= value <= _LARGEST:
            raise OverflowError(raw)
        return value

    return bounded


def size(low: int) -> Kind:
    """Bytes, at least ``low``."""
    allowed = f"a number of bytes from {low} on, such as 4000000, 4e6, 512K, 4MiB or 1G"
    return Kind("SIZE", allowed + " (units are powers of 1024)", _between(low, _integer))


def automatic(kind: Kind) -> Kind:
    """The same, or "auto", which is read as None."""

    def read(raw: Any) -> Any:
        return None if isinstance(raw, str) and raw.lower() == "auto" else kind.read(raw)

    return Kind(kind.metavar, f"auto, or {kind.allowed}", read)


def count(low: int) -> Kind:
    """A whole number, at least ``low``; no units."""

    def plain(raw: Any) -> int:
        if isinstance(raw, bool) or not isinstance(raw, (str, int)):
            raise TypeError(raw)
        return int(raw)

    return Kind("N", f"a whole number from {low} on", _between(low, plain))


def seconds() -> Kind:
    """A finite time above zero."""

    def read(raw: Any) -> float:
        if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
            raise TypeError(raw)
        value = float(raw)
        if not math.isfinite(value) or value <= 0:
            raise ValueError(raw)
        return value

    return Kind("SECONDS", "a number of seconds above 0", read)


def choice(*words: str) -> Kind:
    """One of the words, in any case."""

    def read(raw: Any) -> str:
        for word in words:
            if isinstance(raw, str) and raw.lower() == word.lower():
                return word
        raise ValueError(raw)

    return Kind("|".join(words), "one of " + ", ".join(words), read)


def _flag(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if str(raw).lower() in (*_YES, *_NO):
        return str(raw).lower() in _YES
    raise ValueError(raw)


def _text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw or not raw.isprintable():
        raise ValueError(raw)
    return raw


def _address(raw: Any) -> str:
    host, colon, port = _text(raw).removeprefix("tcp://").rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ValueError(raw)
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise ValueError(raw)
    return f"{host}:{port}"


FLAG = Kind("BOOL", "1 or 0, true or false, yes or no, on or off", _flag)
TEXT = Kind("TEXT", "printable text", _text)
FOLDER = Kind("DIR", "the path of a folder", _text)
ADDRESS = Kind("HOST:PORT", "HOST:PORT, with an IPv6 host in brackets", _address)
