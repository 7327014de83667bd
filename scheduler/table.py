"""The tensor table: names become keys, appended in one order for everybody (I1).

An entry never changes. Every member holds a prefix of the same table, so a length and a hash of
that prefix are enough to compare two of them.
"""

from __future__ import annotations

import hashlib
import math
import typing
from collections.abc import Iterable
from typing import Final, NamedTuple

from gradsum.errors import ProtocolError
from gradsum.proto.codec import pack, reader_of
from gradsum.proto.dtypes import size_of
from gradsum.proto.limits import MAX_DIMS, MAX_INT, MAX_NAME
from gradsum.scheduler.policy import Policy, require_built


class TensorSpec(NamedTuple):
    """What a rank says of a tensor when it registers its name.

    dtype is the caller's ("complex64"), wire the element type that travels ("float32"); first is
    the first version that will be pushed.
    """

    name: str
    dtype: str
    wire: str
    shape: tuple[int, ...]
    policy: Policy
    first: int = 1

    @property
    def elements(self) -> int:
        """Wire elements: complex numbers count twice."""
        return math.prod(self.shape) * (2 if self.dtype.startswith("complex") else 1)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.elements * size_of(self.wire)

    def describe(self) -> str:
        """Short text for errors: dtype, shape, policy."""
        text = f"{self.dtype}{list(self.shape)}"
        if self.wire != self.dtype:
            text += f" as {self.wire}"
        if self.policy.kind != "sum":
            text += f" {self.policy.kind} from rank {self.policy.root}"
        return text


class Table:
    """Append-only list of specs; the key of a tensor is its place in the list."""

    __slots__ = ("_digests", "_keys", "_specs")

    def __init__(self) -> None:
        self._specs: list[TensorSpec] = []
        self._keys: dict[str, int] = {}
        self._digests = [b""]

    def __len__(self) -> int:
        return len(self._specs)

    def __getitem__(self, key: int) -> TensorSpec:
        return self._specs[key]

    def get(self, key: int) -> TensorSpec | None:
        """The spec of a key, or None beyond the end."""
        return self._specs[key] if 0 <= key < len(self._specs) else None

    def key(self, name: str) -> int | None:
        """The key of a name, or None."""
        return self._keys.get(name)

    def append(self, spec: TensorSpec) -> int:
        """Add a new name; the caller has checked that it is new."""
        if spec.name in self._keys:
            raise ProtocolError(f"tensor {spec.name!r} is in the table already", tensor=spec.name)
        key = len(self._specs)
        self._specs.append(spec)
        self._keys[spec.name] = key
        self._digests.append(
            hashlib.blake2b(self._digests[-1] + pack(spec), digest_size=16).digest()
        )
        return key

    def extend(self, start: int, specs: Iterable[TensorSpec]) -> int:
        """Take specs that begin at ``start``; what is known already is passed over.

        Returns how many were new. A gap is a ProtocolError: ask for the missing part.
        """
        if start > len(self):
            raise ProtocolError(f"table entries from {start} on, but only {len(self)} are known")
        fresh = list(specs)[len(self) - start :]
        for spec in fresh:
            self.append(spec)
        return len(fresh)

    def since(self, start: int) -> tuple[TensorSpec, ...]:
        """All entries from ``start`` on."""
        return tuple(self._specs[start:])

    @property
    def digest(self) -> bytes:
        """Hash of the whole table, 16 bytes (none for an empty one); equal tables, equal hashes."""
        return self._digests[-1]

    def digest_at(self, length: int) -> bytes | None:
        """Hash of the first ``length`` entries; None beyond the end."""
        return self._digests[length] if 0 <= length < len(self._digests) else None

    @property
    def nbytes(self) -> int:
        """Wire bytes of all tensors together."""
        return sum(spec.nbytes for spec in self._specs)


_READ_SPEC = reader_of(TensorSpec)
NAME_HINT: Final = f"names have 1 to {MAX_NAME} bytes of UTF-8"


def name_error(name: str) -> str:
    """What is wrong with a tensor's name; "" if nothing is."""
    size = len(name.encode(errors="surrogatepass"))
    if not 1 <= size <= MAX_NAME:
        return f"tensor name {name[:40]!r} has {size} bytes"
    surrogate = any("\ud800" <= letter <= "\udfff" for letter in name)
    return f"tensor name {name[:40]!r} is not valid Unicode" if surrogate else ""


def parse_spec(raw: object) -> TensorSpec:
    """A TensorSpec from the wire, checked: types, name and shape limits, dtype, policy built."""
    try:
        spec = _READ_SPEC(raw)
    except TypeError as error:
        raise ProtocolError(f"not a tensor spec: {error}") from None
    wrong = name_error(spec.name)
    if wrong:
        raise ProtocolError(wrong, hint=NAME_HINT)
    if len(spec.shape) > MAX_DIMS or any(not 0 <= d <= MAX_INT for d in spec.shape):
        raise ProtocolError(f"shape {spec.shape} of tensor {spec.name!r}", tensor=spec.name)
    if not 0 <= spec.nbytes <= MAX_INT or spec.first < 1:
        raise ProtocolError(f"size or first version of tensor {spec.name!r}", tensor=spec.name)
    require_built(spec.policy, spec.name)
    return typing.cast(TensorSpec, spec)
