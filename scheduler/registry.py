"""Registration: the tensor table, who named what, and the sets of names that ranks must agree on.

Rules (I1): a name with an equal spec has one key for all; a name with another spec is an error on
every rank that named it, now or later, with all sides in it: after a dispute nobody knows which of
its rounds count, so the name is of no further use. A request is taken whole or not at all. Groups
are compared turn by turn: the n-th registration of a group on one rank with the n-th on the others,
so that parameters added later are compared too. A turn ends with the request that is marked last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any, Final, NamedTuple

from gradsum.errors import GradsumError, MismatchError, ProtocolError
from gradsum.proto.codec import pack
from gradsum.proto.control import TableMessage
from gradsum.scheduler.membership import listing
from gradsum.scheduler.table import Table, TensorSpec, parse_spec

PAGE_BYTES: Final = 512 << 10
PAGE_SPECS: Final = 2000
SHOWN: Final = 5


class Accepted(NamedTuple):
    """Keys in the order of the request; entries of the table from ``start`` on are new."""

    keys: tuple[int, ...]
    start: int


class Rejected(NamedTuple):
    """Why not; ``others`` are further ranks whose operations on the error's tensor fail."""

    error: GradsumError
    others: tuple[int, ...] = ()


def pages(table: Table, start: int) -> Iterator[TableMessage]:
    """The table from ``start`` on, in messages well below the limit of control messages."""
    first, size = start, 0
    specs: list[TensorSpec] = []
    for key, spec in enumerate(table.since(start), start):
        room = len(pack(spec))
        if specs and (size + room > PAGE_BYTES or len(specs) == PAGE_SPECS):
            yield TableMessage(first, tuple(specs))
            first, size, specs = key, 0, []
        specs.append(spec)
        size += room
    if specs:
        yield TableMessage(first, tuple(specs))


class Registry:
    """The table of one job and what each rank said of it. max_bytes 0 is no limit."""

    __slots__ = (
        "_claims", "_disputed", "_groups", "_max_bytes", "_max_tensors", "_parts",
        "nbytes", "table",
    )  # fmt: skip

    def __init__(self, max_tensors: int, max_bytes: int) -> None:
        self.table = Table()
        self.nbytes = 0
        self._max_tensors = max_tensors
        self._max_bytes = max_bytes
        self._claims: dict[str, dict[int, TensorSpec]] = {}
        self._disputed: set[str] = set()
        self._groups: dict[str, dict[int, list[frozenset[str]]]] = {}
        self._parts: dict[tuple[int, str], set[str]] = {}  # turns that have not ended

    def register(
        self, rank: int, group: str, raw: Sequence[Any], last: bool = True
    ) -> Accepted | Rejected:
        """Take names from a rank: new ones are appended, known ones compared."""
        specs = self._checked(rank, raw)
        if isinstance(specs, Rejected):
            self._parts.pop((rank, group), None)
            return specs
        start = len(self.table)
        fresh = self._fresh(specs)
        for spec in fresh:
            self.table.append(spec)
            self.nbytes += spec.nbytes
        for spec in specs:
            self._claims.setdefault(spec.name, {})[rank] = spec
        if group:
            self._collect(rank, group, specs, last)
        return Accepted(tuple(self._key(spec.name) for spec in specs), start)

    def _checked(self, rank: int, raw: Sequence[Any]) -> list[TensorSpec] | Rejected:
        """The specs of a request, or why none of them is taken."""
        try:
            specs = [parse_spec(item) for item in raw]
            self._require_room(self._fresh(specs))
        except GradsumError as error:
            return Rejected(error)
        clashes = (self._clash(rank, spec) for spec in specs)
        return next((clash for clash in clashes if clash is not None), None) or specs

    def _collect(self, rank: int, group: str, specs: Sequence[TensorSpec], last: bool) -> None:
        names = self._parts.setdefault((rank, group), set())
        names.update(spec.name for spec in specs)
        if last:
            del self._parts[rank, group]
            turns = self._groups.setdefault(group, {}).setdefault(rank, [])
            turns.append(frozenset(names))

    def _key(self, name: str) -> int:
        key = self.table.key(name)
        if key is None:
            raise ProtocolError(f"tensor {name!r} is not in the table", tensor=name)
        return key

    def _fresh(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        fresh: dict[str, TensorSpec] = {}
        for spec in specs:
            if fresh.get(spec.name, spec) != spec:
                raise MismatchError(
                    f"tensor {spec.name!r} is named twice in one registration: "
                    f"{_side(fresh[spec.name], spec)} and {_side(spec, fresh[spec.name])}",
                    tensor=spec.name,
                    hint="give each tensor its own name",
                )
            if self.table.key(spec.name) is None:
                fresh[spec.name] = spec
        return list(fresh.values())

    def _require_room(self, fresh: Sequence[TensorSpec]) -> None:
        count = len(self.table) + len(fresh)
        if count > self._max_tensors:
            raise ProtocolError(
                f"too many tensors: needs {count}, have {self._max_tensors}",
                hint="raise max_tensors on the coordinator",
            )
        total = self.nbytes + sum(spec.nbytes for spec in fresh)
        if self._max_bytes and total > self._max_bytes:
            raise ProtocolError(
                f"too many bytes in this job: needs {total}, have {self._max_bytes}",
                tensor=max(fresh, key=lambda spec: spec.nbytes).name,
                hint="raise max_job_bytes on the coordinator, or give the servers more memory",
            )

    def _clash(self, rank: int, spec: TensorSpec) -> Rejected | None:
        """The error for all sides if any rank has named the tensor with another spec."""
        key = self.table.key(spec.name)
        if key is None or (self.table[key] == spec and spec.name not in self._disputed):
            return None
        claims = self._claims.setdefault(spec.name, {})
        agreed = self.table[key]
        latest = claims.get(rank, spec) if spec == agreed else spec  # a dispute has no way back
        every = {**claims, rank: latest}
        rival = next((claim for claim in every.values() if claim != agreed), spec)
        sides: dict[str, set[int]] = {}
        for other, claim in sorted(every.items()):
            sides.setdefault(_side(claim, rival if claim == agreed else agreed), set()).add(other)
        if claims.get(rank) == agreed and len(claims) == 1:
            sides = {_side(agreed, spec) + " before": {rank}, _side(spec, agreed) + " now": {rank}}
        text = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {listing(ranks)}: {side}"
            for side, ranks in sides.items()
        )
        others = tuple(sorted(claims.keys() - {rank}))
        if others:
            self._disputed.add(spec.name)
        if claims.get(rank) != agreed:
            claims[rank] = latest
        error = MismatchError(
            f"ranks disagree about tensor {spec.name!r}: {text}",
            tensor=spec.name,
            hint="every rank must name a tensor with the same shape, dtype and policy; "
            "this job must not use the name any more",
        )
        return Rejected(error, others)

    def compare(self, active: Set[int]) -> MismatchError | None:
        """The first difference between the name sets of complete turns, or None.

        ``active`` are the ranks that must agree; the others are left out.
        """
        for group, turns in self._groups.items():
            if not active or not active <= turns.keys():
                continue
            for turn in range(min(len(turns[rank]) for rank in active)):
                sets = {rank: turns[rank][turn] for rank in sorted(active)}
                if len(set(sets.values())) > 1:
                    return _difference(group, sets)
            self._forget(turns, active)
        return None

    @staticmethod
    def _forget(turns: dict[int, list[frozenset[str]]], active: Set[int]) -> None:
        """Equal turns need no second look."""
        done = min(len(turns[rank]) for rank in active)
        for names in turns.values():
            del names[:done]

    def missing(self, name: str, ranks: Set[int]) -> list[int]:
        """The ranks that have not named this tensor."""
        return sorted(ranks - self._claims.get(name, {}).keys())

    def unnamed(self, ranks: Set[int], limit: int) -> dict[str, list[int]]:
        """Up to ``limit`` tensors that not all of these ranks have named, and who has not."""
        found: dict[str, list[int]] = {}
        for name in self._claims:
            lacking = self.missing(name, ranks)
            if lacking:
                found[name] = lacking
            if len(found) == limit:
                break
        return found


def _side(spec: TensorSpec, other: TensorSpec) -> str:
    """One side of a mismatch: the description, and what it leaves out where that differs."""
    text = spec.describe()
    if text != other.describe():
        return text
    if spec.first != other.first:
        text += f" from version {spec.first}"
    if spec.policy != other.policy:
        fields = zip(spec.policy._fields, spec.policy, other.policy, strict=True)
        text += "".join(f" {field}={mine!r}" for field, mine, their in fields if mine != their)
    if spec.wire != other.wire:
        text += f" as {spec.wire}"
    return text


def _difference(group: str, sets: dict[int, frozenset[str]]) -> MismatchError:
    every = frozenset().union(*sets.values())
    lacks = {rank: sorted(every - names) for rank, names in sets.items()}
    first = min(name for names in lacks.values() for name in names)
    parts = [
        f"rank {rank} lacks {', '.join(map(repr, names[:SHOWN]))}"
        + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        for rank, names in lacks.items()
        if names
    ]
    return MismatchError(
        f"ranks registered different sets of tensors in {group!r}: {'; '.join(parts)}",
        tensor=first,
        hint="build the same model and wrap the same parameters on every rank",
    )
