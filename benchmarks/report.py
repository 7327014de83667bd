"""From measurements to figures, as JSON and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.cases import Case
from gradsum.scheduler.fluid import optimum
from gradsum.scheduler.profiles import profile

_SHOWN = ("ratio", "ratio_ddp", "share", "optimum")
IDLE = 0.30
"""Idle share below which the processors, not the links, may bound a shaped run (reference, B5)."""


def figures(case: Case, measured: dict[str, Any], warmup: int) -> dict[str, Any]:
    """Medians, the figures that are owed, and what a reader needs to judge them."""
    timed = {
        name: sorted(found["seconds"][warmup:]) for name, found in measured["contenders"].items()
    }
    median = {name: statistics.median(seconds) for name, seconds in timed.items()}
    found: dict[str, Any] = {
        "case": case.name,
        "median_seconds": median,
        "p90_seconds": {name: s[int(0.9 * (len(s) - 1) + 0.5)] for name, s in timed.items()},
        "rounds": {name: len(seconds) for name, seconds in timed.items()},
        "wrong": sum(each["wrong"] for each in measured["contenders"].values()),
        "idle": measured["idle"],
        "links": sorted(set(measured["links"].values())),
        "usage": measured["usage"],
        "servers": measured["servers"],
        "owed": dict(case.owed),
        "settings": dict(case.settings),
    }
    for other in ("gloo", "ddp"):
        if other in median and "gradsum" in median:
            name = "ratio" if other == "gloo" else "ratio_ddp"
            found[name] = median[other] / median["gradsum"]
    if "link" in measured:
        link = statistics.mean(measured["link"].values())
        found["link_bytes_per_second"] = measured["link"]
        if case.model:
            found |= _training(case, measured, link, median[case.contender])
        else:
            found["share"] = case.best / link / median["gradsum"]
        found["interfaces"] = measured["interfaces"]
        found["bound_by_processor"] = measured["idle"] < IDLE
    return found


def _training(
    case: Case, measured: dict[str, Any], link: float, median: float
) -> dict[str, Any]:
    """What the step could have taken, at the goodput that a bulk transfer of the run reached."""
    bulk = measured.get("bulk")
    rate = case.best / bulk if bulk else link
    shape = profile(case.model).shrunk(case.nbytes).paced(measured["compute"])
    best = optimum(shape, case.workers, case.servers, rate)
    return {
        "compute_seconds": measured["compute"],
        "bulk_bytes_per_second": rate,
        "optimum_seconds": best,
        "optimum": best / median,
    }


def reached(found: dict[str, Any]) -> bool:
    """Whether everything owed was reached, with no wrong element."""
    return not found["wrong"] and all(
        found.get(name, 0.0) >= value for name, value in found["owed"].items()
    )


def _ours(run: dict[str, Any]) -> float:
    times: dict[str, float] = run["median_seconds"]
    return times.get("gradsum", max(times.values()))


def merge(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median run by our time; with the spread of every figure over the runs."""
    ordered = sorted(runs, key=_ours)
    chosen = dict(ordered[len(ordered) // 2])
    for name in _SHOWN:
        values = sorted(run[name] for run in runs if name in run)
        if values:
            chosen[name] = statistics.median(values)
            chosen[f"{name}_runs"] = [round(value, 3) for value in values]
    chosen["wrong"] = sum(run["wrong"] for run in runs)
    return chosen


def line(found: dict[str, Any]) -> str:
    """One row for people."""
    times = "  ".join(f"{n} {s * 1e3:.2f} ms" for n, s in found["median_seconds"].items())
    shown = [
        f"{name} {found[name]:.3f}" + (f" (owed {found['owed'][name]:g})" if name in found["owed"]
                                       else "")
        for name in _SHOWN if name in found
    ]  # fmt: skip
    notes = ["" if reached(found) else "NOT REACHED"]
    notes.append(f"{found['wrong']} WRONG ELEMENTS" if found["wrong"] else "")
    notes.append("processor-bound" if found.get("bound_by_processor") else "")
    rest = "  ".join(filter(None, [*shown, f"idle {found['idle']:.0%}", *notes]))
    return f"{found['case']:28} {times}  {rest}"
