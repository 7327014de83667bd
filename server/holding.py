"""Holding: what a shard holds under its plan: table, layout, slots, who writes and reads."""

from __future__ import annotations

from gradsum.errors import ProtocolError
from gradsum.proto.data import Header
from gradsum.scheduler.plan import Plan
from gradsum.scheduler.policy import SUM, Policy
from gradsum.scheduler.slicing import Layout, Unit
from gradsum.scheduler.table import Table, TensorSpec
from gradsum.server.slot import Slot


class Holding:
    """Answers about keys and slices; a slot exists from the first push that names it."""

    __slots__ = ("_layout", "_readers", "_writers", "index", "joined", "plan", "slots", "table")

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.index = -1
        self.table = Table()
        self.joined: set[int] = set()
        self.slots: dict[tuple[int, int], Slot] = {}
        self._layout: Layout | None = None
        self._writers: dict[Policy, tuple[int, ...]] = {}
        self._readers: dict[Policy, tuple[int, ...]] = {}

    @property
    def epoch(self) -> int:
        """Of the plan in force, 0 before the first."""
        return self.plan.epoch if self.plan else 0

    def means_us(self, header: Header) -> bool:
        """Whether a header of this epoch is of this job, from and for incarnations of the plan."""
        plan = self.plan
        return (
            plan is not None
            and header.job == plan.job
            and header.incarnation == plan.members.get(header.rank)
            and header.server_incarnation == plan.servers[self.index].incarnation
        )

    def adopt(self, plan: Plan, index: int) -> None:
        """A plan is in force; slots of the old one are over (E1)."""
        self.plan = plan
        self.index = index
        self._layout = plan.layout(self.table)
        self.slots.clear()
        self._forget()

    def extend(self, start: int, specs: tuple[TensorSpec, ...]) -> None:
        """Table entries from ``start`` on."""
        self.table.extend(start, specs)
        if self._layout is not None:
            self._layout.extend()

    def join(self, rank: int) -> None:
        """A rank is ABSENT from here on (E7)."""
        self.joined.add(rank)
        self._forget()

    def _forget(self) -> None:
        self._writers.clear()
        self._readers.clear()

    def unit(self, key: int) -> Unit | None:
        """The unit of a key; None when the plan or the table does not have it (yet)."""
        return self._layout.units.get(key) if self._layout else None

    def policy(self, slot: Slot) -> Policy:
        """Of the tensors that a slot adds."""
        unit = self.unit(slot.key)
        return unit.policy if unit else Policy()

    def slot(self, unit: Unit, number: int) -> Slot | None:
        """The slot of a slice, None when another server holds it."""
        if number >= len(unit.slices) or unit.slices[number].server != self.index:
            return None
        slot = self.slots.get((unit.key, number))
        if slot is None:
            slot = Slot(unit.key, number, unit.wire, self.base(unit))
            self.slots[unit.key, number] = slot
        return slot

    def base(self, unit: Unit) -> int:
        """The version where the clocks of a unit start."""
        if self.plan is None:
            raise ProtocolError("no plan yet")
        return self.plan.base(unit.key, self.table)

    def ordered(self, policy: Policy) -> bool:
        """Whether contributions are added in rank order: two commute (S6)."""
        plan = self.plan
        return plan is not None and plan.message.deterministic and len(self.writers(policy)) > 2

    def members(self, policy: Policy) -> int:
        """The divisor of a round; ranks that have joined stay in it (E7)."""
        return len(self.plan.members) if self.plan and policy.kind == SUM else 1

    def writers(self, policy: Policy) -> tuple[int, ...]:
        """Ranks that owe a contribution to each round."""
        if policy not in self._writers and self.plan is not None:
            self._writers[policy] = tuple(
                rank for rank in sorted(self.plan.members)
                if policy.writes(rank) and rank not in self.joined
            )  # fmt: skip
        return self._writers.get(policy, ())

    def readers(self, policy: Policy) -> tuple[int, ...]:
        """A rank that has joined reads no sums, but the broadcasts that end its job (E7)."""
        if policy not in self._readers and self.plan is not None:
            self._readers[policy] = tuple(
                rank for rank in sorted(self.plan.members)
                if policy.reads(rank) and (policy.kind != SUM or rank not in self.joined)
            )  # fmt: skip
        return self._readers.get(policy, ())
