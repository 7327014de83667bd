"""What ranks learnt in their first window: how often hooks fire (V4) and in which order (E8).

Rules: 0 firings on one rank against n on another is legal (a parameter used on some ranks only);
two different non-zero numbers are an error on all ranks. The order of the lowest rank that reported
counts for all, missing tensors follow in key order. Only tensors with a packing group are packed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from gradsum.errors import MismatchError
from gradsum.proto.control import Firings, WindowReport
from gradsum.scheduler.table import Table


class Windows:
    """The window reports of one job."""

    __slots__ = ("_done", "_orders", "_reports", "_table")

    def __init__(self, table: Table) -> None:
        self._table = table
        self._reports: dict[str, dict[int, WindowReport]] = {}
        self._done: dict[str, Firings] = {}
        self._orders: dict[str, tuple[int, ...]] = {}

    def add(self, rank: int, report: WindowReport) -> Firings | None:
        """Take a report; returns the answer if it has been given to the others already."""
        done = self._done.get(report.group)
        if done is None:
            self._reports.setdefault(report.group, {}).setdefault(rank, report)
        return done

    def knows(self, report: WindowReport) -> bool:
        """Whether all keys of a report are in the table."""
        size = len(self._table)
        return all(0 <= key < size for key in (*report.counts, *report.order))

    def settle(self, needed: Set[int]) -> list[Firings | MismatchError]:
        """What has become complete; ``needed`` are the ranks that have neither left nor joined."""
        found: list[Firings | MismatchError] = []
        for group in [g for g, sent in self._reports.items() if sent and needed <= sent.keys()]:
            reports = self._reports.pop(group)
            result = self._merge(group, reports)
            if isinstance(result, Firings):
                self._done[group] = result
                self._orders[group] = self._order(group, reports, result)
            found.append(result)
        return found

    def _merge(self, group: str, reports: dict[int, WindowReport]) -> Firings | MismatchError:
        merged: dict[int, int] = {}
        for key in sorted({key for report in reports.values() for key in report.counts}):
            counts = {rank: reports[rank].counts.get(key, 0) for rank in sorted(reports)}
            if len(set(counts.values()) - {0}) > 1:
                return self._mismatch(key, counts)
            merged[key] = max(counts.values())
        return Firings(group, merged)

    def _mismatch(self, key: int, counts: dict[int, int]) -> MismatchError:
        name = self._table[key].name
        text = ", ".join(f"{count} on rank {rank}" for rank, count in list(counts.items())[:8])
        return MismatchError(
            f"the gradient of {name!r} was accumulated a different number of times in the first "
            f"window: {text}",
            tensor=name,
            hint="use the same backward_passes_per_step, and as many passes, on every rank",
        )

    def _order(
        self, group: str, reports: dict[int, WindowReport], firings: Firings
    ) -> tuple[int, ...]:
        order = dict.fromkeys(reports[min(reports)].order)
        order.update(dict.fromkeys(sorted(firings.counts)))
        specs = enumerate(self._table.since(0))
        order.update(dict.fromkeys(key for key, spec in specs if spec.policy.pack == group))
        return tuple(key for key in order if self._table[key].policy.pack)

    @property
    def order(self) -> tuple[int, ...]:
        """Keys that may be packed, group after group in the order of their completion (E8)."""
        merged: dict[int, None] = {}
        for order in self._orders.values():
            merged.update(dict.fromkeys(order))
        return tuple(merged)


def worth_packing(table: Table, order: Sequence[int], pack_bytes: int) -> bool:
    """Whether two tensors at least could share a buffer: same policy and dtype, both small."""
    small = Counter(
        (table[key].policy, table[key].wire)
        for key in order
        if table[key].policy.pack and 0 < table[key].nbytes < pack_bytes
    )
    return any(count > 1 for count in small.values())
