"""Values as bytes: what travels, what is refused, and what junk gets."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsum.errors import ProtocolError
from gradsum.worker.objects import decode, encode

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


def exact(left: Any, right: Any) -> bool:
    """Equal with equal types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return all(exact(a, b) and exact(x, y) for (a, x), (b, y) in pairs)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(exact, left, right))
    return bool(left == right)


@given(VALUES)
def test_values_come_back_with_their_types(value: Any) -> None:
    assert exact(decode(encode(value)), value)


@pytest.mark.parametrize("value", [("tensor", "float32"), ["int", "5"], ("dict", [])], ids=repr)
def test_no_value_is_mistaken_for_a_tag(value: Any) -> None:
    assert exact(decode(encode(value)), value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64], ids=str
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).to(dtype)
    got = decode(encode({"t": value.t() if value.dim() == 2 else value}))["t"]
    assert got.dtype == dtype and got.shape == (shape[::-1] if len(shape) == 2 else shape)
    assert bool((got == 1).all())
    got.zero_()


def test_arrays_and_numbers_of_numpy() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3)[:, ::-1]
    got, number = decode(encode([array, np.float64(0.1)]))
    assert got.dtype == array.dtype and (got == array).all()
    got[0, 0] = 7
    assert type(number) is np.float64 and number == 0.1


def test_an_ordered_dict_comes_back_as_a_dict_in_order() -> None:
    assert list(decode(encode(OrderedDict(b=1, a=2))).items()) == [("b", 1), ("a", 2)]


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, Thing()]}, r"obj\['a'\]\[1\] of type .*Thing"),
        ([{1, 2}], r"obj\[0\] of type builtins\.set"),
        ({Thing: 1}, r"obj key of type builtins\.type"),
        (torch.Size([1]), r"obj of type torch\.Size"),
        (np.array([object()]), r"obj of type numpy\.ndarray"),
        ([torch.eye(2).to_sparse()], r"obj\[0\].*to_dense"),
    ],
    ids=["object", "set", "key", "size", "array of objects", "sparse"],
)
def test_anything_else_is_refused_by_path(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        encode(value)


@given(st.binary(max_size=60))
def test_junk_is_a_protocol_error_or_a_value(data: bytes) -> None:
    try:
        decode(data)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "raw", [("tensor", "load", [1], b"x"), ("array", "O", [1], b"12345678"), ("exec", "1"), ()]
)
def test_crafted_tags_are_refused(raw: Any) -> None:
    from gradsum.proto.codec import pack

    with pytest.raises(ProtocolError):
        decode(pack(raw))
