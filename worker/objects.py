"""Python values as bytes, without pickle: what ``broadcast_object`` can send.

Rules: None, bool, int, float, str, bytes, list, tuple, dict, tensors, numpy arrays and numbers, and
nothing else; types are exact, tuples stay tuples; a refusal names the type and the path to it.
Containers are tagged pairs on the wire, so no value can be mistaken for a tag.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from gradsum.errors import ProtocolError
from gradsum.proto.codec import pack, unpack
from gradsum.worker.tensors import dtype_name, host_copy, require_dense, wire_bytes

_PLAIN: Final = (type(None), bool, float, str, bytes)
_WIDE: Final = 1 << 63


def encode(value: Any) -> bytes:
    """The bytes of a value; TypeError naming the first part that cannot travel."""
    return pack(_tag(value, "obj"))


def decode(data: bytes | memoryview) -> Any:
    """The value of bytes made by ``encode``; ProtocolError for anything else."""
    try:
        return _untag(unpack(data, limit=max(len(data), 1)))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ProtocolError(f"not an encoded object: {type(error).__name__}") from None


def _tag(value: Any, path: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -_WIDE <= value < _WIDE else ("int", str(value))
    if kind is list or kind is tuple:
        return (kind.__name__, [_tag(v, f"{path}[{i}]") for i, v in enumerate(value)])
    if isinstance(value, dict) and kind.__name__ in ("dict", "OrderedDict"):
        pairs = value.items()
        return ("dict", [(_tag(k, f"{path} key"), _tag(v, f"{path}[{k!r}]")) for k, v in pairs])
    if isinstance(value, torch.Tensor):
        dense = host_copy(require_dense(value, path).detach())
        return ("tensor", dtype_name(dense.dtype), list(dense.shape), bytes(wire_bytes(dense)))
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        tag = "array" if isinstance(value, np.ndarray) else "number"
        return (tag, value.dtype.str, list(value.shape), value.tobytes())
    raise TypeError(
        f"broadcast_object cannot send {path} of type {kind.__module__}.{kind.__qualname__}: "
        "use None, bool, int, float, str, bytes, list, tuple, dict, tensors or numpy arrays"
    )


def _untag(raw: Any) -> Any:
    if not isinstance(raw, tuple):
        return raw
    tag, *rest = raw
    if tag == "int":
        return int(rest[0])
    if tag in ("list", "tuple"):
        values = [_untag(v) for v in rest[0]]
        return values if tag == "list" else tuple(values)
    if tag == "dict":
        return {_untag(k): _untag(v) for k, v in rest[0]}
    if tag == "tensor":
        return _tensor(*rest)
    if tag not in ("array", "number"):
        raise ValueError(tag)
    dtype, shape, data = rest
    array = np.frombuffer(data, dtype=dtype).reshape(shape).copy()
    return array if tag == "array" else array[()]


def _tensor(name: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(name)
    tensor = torch.empty(shape, dtype=dtype)
    wire_bytes(tensor)[:] = data
    return tensor
