"""One process's membership as the front end keeps it: the session and the names used so far.

Rules: a name stands for one dtype, shape and policy for ever (I1), so a change is reported before
anything is sent; raw calls count versions per name (V2), on every rank alike. Any thread may call.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from gradsum.errors import MismatchError, UsageError
from gradsum.scheduler.policy import SUM, Policy, require_built
from gradsum.scheduler.table import TensorSpec
from gradsum.worker.bundle import Bundles
from gradsum.worker.face import Handle, Session
from gradsum.worker.memory import OpenMemory
from gradsum.worker.rounds import Sink


class Entry:
    """A registered name: its key and the rounds begun so far."""

    __slots__ = ("_count", "_lock", "key", "spec")

    def __init__(self, key: int, spec: TensorSpec) -> None:
        self.key = key
        self.spec = spec
        self._count = spec.first - 1
        self._lock = threading.Lock()

    def submit(
        self, session: Session, source: memoryview | None, sink: Sink | None, priority: int
    ) -> Handle:
        """Begin the next round of this name; versions reach the session in order."""
        with self._lock:
            handle = session.submit(self.key, self._count + 1, source, sink, priority)
            self._count += 1
        return handle


class Client:
    """A session with its book of names and its wrapped optimizers."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._optimizers: list[weakref.ref[Any]] = []
        self.memory = OpenMemory()
        self.bundles: dict[tuple[str | None, Any], Bundles] = {}
        self._entries: dict[str, Entry] = {}
        self._policies: dict[str, Policy] = {}
        self._turns: dict[str, int] = {}
        self._lock = threading.Lock()

    def declare(self, name: str, policy: Policy | None = None) -> None:
        """Fix the policy of a name before its first use."""
        chosen = policy or Policy()
        require_built(chosen, name)
        if chosen.kind != SUM:
            raise UsageError(
                f"name {name!r} is declared for {chosen.kind}, which push_pull does not do",
                hint="use broadcast_parameters() or broadcast_object()",
            )
        with self._lock:
            entry = self._entries.get(name)
            if (entry.spec.policy if entry else self._policies.setdefault(name, chosen)) != chosen:
                raise MismatchError(
                    f"name {name!r} has another policy already",
                    tensor=name,
                    hint="declare a name once, before its first use",
                )

    def keep(self, optimizer: object) -> None:
        """Remember a wrapped optimizer, as long as the user does."""
        self._optimizers.append(weakref.ref(optimizer))

    def settle(self) -> None:
        """Make all steps of optimizers that are due (cross-barrier)."""
        for optimizer in self.optimizers():
            optimizer.settle()

    def optimizers(self) -> list[Any]:
        """The wrapped optimizers, in the order of wrapping."""
        return [alive for ref in self._optimizers if (alive := ref()) is not None]

    def turn(self, what: str) -> int:
        """How often this was asked before."""
        with self._lock:
            turn = self._turns.get(what, 0)
            self._turns[what] = turn + 1
        return turn

    def policy(self, name: str) -> Policy:
        """The declared policy of a name, or the default: all ranks write and read."""
        return self._policies.get(name, _DEFAULT)

    def fitting(self, spec: TensorSpec) -> TensorSpec:
        """The spec under its own name or, where this rank used that for something else, ``name#2``.

        For names that the user did not choose: two models may both have a "0.weight" (C08). Ranks
        that make the same calls find the same name.
        """
        for count in itertools.count(1):
            renamed = spec if count == 1 else spec._replace(name=f"{spec.name}#{count}")
            entry = self._entries.get(renamed.name)
            if entry is None or entry.spec == renamed:
                break
        return renamed

    def enter(self, specs: Sequence[TensorSpec]) -> list[Entry]:
        """Entries for the specs, those that are new registered in one call.

        MismatchError if this rank used a name with another dtype, shape or policy before.
        """
        with self._lock:
            known = [self._entries.get(spec.name) for spec in specs]
        fresh = [spec for spec, entry in zip(specs, known, strict=True) if entry is None]
        if fresh:
            keys = self.session.register(fresh)
            with self._lock:
                for key, spec in zip(keys, fresh, strict=True):
                    self._entries.setdefault(spec.name, Entry(key, spec))
        entries = [self._entries[spec.name] for spec in specs]
        for entry, spec in zip(entries, specs, strict=True):
            _require_same(entry.spec, spec)
        return entries


def _require_same(old: TensorSpec, new: TensorSpec) -> None:
    if old == new:
        return
    raise MismatchError(
        f"name {new.name!r} was {old.describe()}, now {new.describe()}; use another name",
        tensor=new.name,
        hint="a name stands for one dtype, shape and policy; give each size its own name",
    )


_DEFAULT = Policy()
