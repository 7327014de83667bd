"""The answer to ``gradsum status``: a JSON-able picture of the coordinator's state."""

from __future__ import annotations

from typing import Any, Final

from gradsum.scheduler.job import Config, Job
from gradsum.scheduler.membership import Member, Membership, State

SHOWN_NAMES: Final = 20
DETAILED: Final = 256
"""Members up to which their counters fit the reply."""


def describe(config: Config, members: Membership, job: Job | None, now: float) -> dict[str, Any]:
    """Members, servers and, with a job running, its plan, tables and what it waits for."""
    picture: dict[str, Any] = {
        "job": members.job,
        "workers": config.workers,
        "servers_expected": config.servers,
        "members": [_worker(m, config, now) for _, m in sorted(members.workers.items())],
        "servers": [_server(m, job, now) for _, m in sorted(members.servers.items())],
        "missing": "" if members.sealed else members.missing(),
        "epoch": 0,
    }
    everyone = picture["members"] + picture["servers"]
    if len(everyone) > DETAILED:
        for entry in everyone:
            del entry["info"]
    picture["tunes"] = config.tune
    if job is None:
        return picture
    plan, table = job.plan, job.registry.table
    at_work = members.ranks(State.HERE)
    fence, tuning = job.fences.current, job.adaptation.tuning
    awaited = job.fences.awaited(at_work)
    picture |= {
        "epoch": plan.epoch,
        "slice_bytes": plan.slice_bytes,
        "pack_bytes": plan.pack_bytes,
        "deterministic": plan.deterministic,
        "tensors": len(table),
        "bytes": job.registry.nbytes,
        "packing": len(plan.packing),
        "tune": None if tuning is None else tuning.picture(),
        "fence": None if fence is None else {**fence._asdict(), "awaited": awaited},
        "gathers": job.gathers.waiting(at_work),
        "unnamed": job.registry.unnamed(at_work, SHOWN_NAMES),
    }
    return picture


def _common(member: Member, now: float) -> dict[str, Any]:
    return {
        "host": member.hello.host,
        "pid": member.hello.pid,
        "incarnation": member.incarnation,
        "state": member.state.value,
        "connected": member.closed is None,
        "age": round(now - member.heard, 3),
        "epoch": member.epoch,
        "table": member.table,
        "info": member.info,
    }


def _worker(member: Member, config: Config, now: float) -> dict[str, Any]:
    return {
        "rank": member.rank,
        "step": member.step,
        "idle": member.idle,
        "stalled": member.idle > config.stall_warning,
        "restart": member.hello.restart,
        **_common(member, now),
    }


def _server(member: Member, job: Job | None, now: float) -> dict[str, Any]:
    weights = {s.number: s.weight for s in job.plan.servers} if job else {}
    return {
        "index": member.rank,
        "address": member.hello.data,
        "control": member.hello.control,
        "weight": weights.get(member.rank),
        **_common(member, now),
    }
