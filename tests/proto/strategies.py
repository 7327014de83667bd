"""Hypothesis strategies for typed tuples, made from their annotations, and for junk."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgpack
from hypothesis import strategies as st

from gradsum.proto.limits import MAX_INT

Strategy = st.SearchStrategy[Any]

INTEGERS = st.integers(-MAX_INT, MAX_INT)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | st.text(max_size=20)
VALUES: Strategy = st.recursive(
    SCALARS | st.binary(max_size=20), lambda inner: st.lists(inner, max_size=4).map(tuple)
)
"""Anything that msgpack carries, lists as tuples."""


def of(annotation: Any) -> Strategy:
    """Values of an annotation as the codec knows them."""
    if annotation is Any:
        return VALUES
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(of, args))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return st.lists(of(args[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(of, args))
    if origin is dict:
        return st.dictionaries(of(args[0]), of(args[1]), max_size=4)
    if hasattr(annotation, "_fields"):
        return record(annotation)
    return {
        int: INTEGERS, str: st.text(max_size=30), bytes: st.binary(max_size=30),
        bool: st.booleans(), float: st.floats(allow_nan=False), type(None): st.none(),
    }[annotation]  # fmt: skip


def record(kind: Any) -> Strategy:
    """Instances of a NamedTuple."""
    hints = typing.get_type_hints(kind)
    return st.tuples(*(of(hints[name]) for name in kind._fields)).map(kind._make)


def junk(limit: int = 400) -> Strategy:
    """Bytes that no honest peer sends: noise, and well-formed msgpack of the wrong shape."""
    maps = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
    packed = (VALUES | maps).map(msgpack.packb)
    return st.binary(max_size=limit) | packed
