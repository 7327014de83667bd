"""What a core or an engine is waiting for, in lines; for the message of a failed run."""

from __future__ import annotations

from typing import Any

from gradsum.server.engine import Engine
from gradsum.worker.core import Core


def worker(core: Core, where: str) -> list[str]:
    """A rank: operations, flights, lanes."""
    epoch = core.plan.epoch if core.plan else None
    lines = [f"rank {core.rank}: {where} epoch {epoch} {core.counters}"]
    lines += [f"  waits k{op.key} v{op.version} missing {op.missing}" for op in core.waiting()]
    for stream in core._streams.values():
        lines += [
            f"  k{stream.unit.key}.{flight.slice.number} v{stream.base + 1} {flight.phase.name} "
            f"server {flight.slice.server} due {flight.due:.3f}"
            for flight in (stream.round.flights if stream.round else ())
        ]
    return lines + _lanes(core._queue)


def server(index: int, engine: Engine) -> list[str]:
    """A server: rounds that are open or retained, lanes."""
    epoch = engine.plan.epoch if engine.plan else None
    lines = [f"server {index}: epoch {epoch} parked {engine._parking.used} {engine.counters}"]
    for slot in engine._holding.slots.values():
        done = slot.done and (slot.done.version, slot.done.owed, slot.done.queued)
        opened = slot.open and (slot.open.contributed, slot.open.later)
        if done or opened:
            lines.append(f"  {slot.key}.{slot.index} base {slot.base} done {done} open {opened}")
    return lines + _lanes(engine._egress._queue)


def _lanes(queue: Any) -> list[str]:
    return [
        f"  lane {number}: generation {lane.generation} sent {lane.sent} seen {lane.seen} "
        f"limit {lane.limit} waiting {len(lane.heap)}"
        for number, lane in queue._lanes.items()
    ]
