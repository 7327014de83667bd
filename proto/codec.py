"""Strict msgpack: typed tuples in, typed tuples out, nothing else.

Rules: limits are explicit and checked before decoding; unknown kinds, wrong field counts and wrong
types are a ProtocolError; no extension types, no pickle, no silent conversion.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any

import msgpack

from gradsum.errors import ProtocolError
from gradsum.proto.limits import MAX_CONTROL

Reader = Callable[[Any], Any]


def pack(value: Any) -> bytes:
    """msgpack bytes of tuples, lists, dicts, str, bytes, int, float, bool and None."""
    return typing.cast(bytes, msgpack.packb(value, use_bin_type=True))


def unpack(data: bytes | memoryview, limit: int = MAX_CONTROL) -> Any:
    """The value of msgpack bytes; ProtocolError for junk or more than ``limit`` bytes."""
    if len(data) > limit:
        raise ProtocolError(f"message of {len(data)} bytes, limit {limit}")
    try:
        return msgpack.unpackb(
            data,
            use_list=False,
            raw=False,
            strict_map_key=False,
            max_ext_len=0,
            max_array_len=limit,
            max_map_len=limit,
            max_str_len=limit,
            max_bin_len=limit,
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"not a msgpack message: {type(error).__name__}") from None


def reader_of(annotation: Any) -> Reader:
    """A function that returns a field's value, typed tuples rebuilt, or raises TypeError.

    Knows int, str, bytes, bool, float, None, unions, tuple[...], dict[...], typed tuples and Any.
    """
    if annotation is Any:
        return lambda value: value
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return _union(tuple(map(reader_of, args)))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _sequence(reader_of(args[0]))
    if origin is tuple:
        return _record(tuple, tuple(map(reader_of, args)))
    if origin is dict:
        return _mapping(reader_of(args[0]), reader_of(args[1]))
    fields = getattr(annotation, "_fields", None)
    if fields is not None:
        hints = typing.get_type_hints(annotation)
        return _record(annotation._make, tuple(reader_of(hints[name]) for name in fields))
    return _exactly((int, float) if annotation is float else (annotation,))


def _exactly(kinds: tuple[type, ...]) -> Reader:
    def read(value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError(type(value).__name__)
        return value

    return read


def _union(options: tuple[Reader, ...]) -> Reader:
    def read(value: Any) -> Any:
        for option in options:
            try:
                return option(value)
            except TypeError:
                continue
        raise TypeError(type(value).__name__)

    return read


def _sequence(item: Reader) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, tuple):
            raise TypeError(type(value).__name__)
        return tuple(map(item, value))

    return read


def _record(make: Callable[[Any], Any], items: tuple[Reader, ...]) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, tuple) or len(value) != len(items):
            raise TypeError(f"not a tuple of {len(items)}")
        return make(item(v) for item, v in zip(items, value, strict=True))

    return read


def _mapping(key: Reader, item: Reader) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise TypeError(type(value).__name__)
        return {key(k): item(v) for k, v in value.items()}

    return read


class Codec:
    """Encodes NamedTuples of a fixed set as ``[kind, *fields]``; the kind is the class name."""

    __slots__ = ("_kinds", "_plain", "_readers")

    def __init__(self, kinds: tuple[type[Any], ...]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._readers: dict[str, list[tuple[str, Reader]]] = {}
        self._plain: dict[str, tuple[type, ...]] = {}
        for kind in kinds:
            hints = typing.get_type_hints(kind)
            fields = tuple(hints[name] for name in kind._fields)
            self._readers[kind.__name__] = list(
                zip(kind._fields, map(reader_of, fields), strict=True)
            )
            if all(field in (int, str, bytes, bool) for field in fields):
                self._plain[kind.__name__] = (str, *fields)

    def encode(self, message: tuple[Any, ...]) -> bytes:
        """Bytes of one message."""
        return pack((type(message).__name__, *message))

    def decode(self, data: bytes | memoryview, limit: int = MAX_CONTROL) -> Any:
        """The message in ``data``; ProtocolError names the kind and the field that is wrong."""
        return self.build(unpack(data, limit))

    def build(self, value: Any) -> Any:
        """The message of an unpacked ``(kind, *fields)``."""
        if not isinstance(value, tuple) or not value or not isinstance(value[0], str):
            raise ProtocolError("not a message: no kind")
        kind = self._kinds.get(value[0])
        if kind is None:
            raise ProtocolError(f"unknown message kind {value[0][:40]!r}")
        if self._plain.get(value[0]) == tuple(map(type, value)):
            return kind(*value[1:])  # the records of every round take this way
        readers = self._readers[value[0]]
        if len(value) != len(readers) + 1:
            raise ProtocolError(f"{value[0]}: {len(value) - 1} fields, expected {len(readers)}")
        return kind(*(self._read(value[0], *r, v) for r, v in zip(readers, value[1:], strict=True)))

    @staticmethod
    def _read(kind: str, name: str, reader: Reader, value: Any) -> Any:
        try:
            return reader(value)
        except TypeError as error:
            raise ProtocolError(f"{kind}.{name}: wrong type, {error}") from None
