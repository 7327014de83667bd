"""From measurements to figures, as JSON and as a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.cases import Case
from gradsum.scheduler.fluid import optimum
from gradsum.scheduler.placement import shares
from gradsum.scheduler.profiles import Profile, parse, profile
from gradsum.scheduler.schedule import SCHEDULES
from gradsum.scheduler.simulator.cluster import Cluster
from gradsum.scheduler.simulator.run import simulate

SHOWN = ("ratio", "ratio_ddp", "share", "optimum", "predicted", "placement", "urgent_p99",
          "gain", "as_predicted")  # fmt: skip
SETTLED = 8
_AT_MOST = ("urgent_p99",)
LATENCY = 0.001
FRAME = 0.0001
"""Seconds from process to process and of work for each slice, as in a lab on two cores."""

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
        if case.program == "urgent":
            delays = sorted(timed["gradsum"])
            found["urgent_p99"] = delays[min(int(0.99 * len(delays)), len(delays) - 1)]
            found["share"] = measured["backlog"] / link
        elif case.program == "transformer":
            found |= _transformer(case, measured, link, median)
        elif case.later:
            steps = measured["contenders"]["gradsum"]["seconds"][warmup:]
            parts = steps[: case.rounds], steps[case.rounds :]
            found["settled"] = [statistics.median(part[-SETTLED:]) for part in parts]
            found["seconds"] = steps
        elif case.model:
            found |= _training(case, measured, link, median[case.contender])
        else:
            found["share"] = case.best / link / median["gradsum"]
            if "placement" in case.owed:
                rounds = len(measured["contenders"]["gradsum"]["seconds"])
                found["placement"] = _placement(case, measured, rounds)
        found["interfaces"] = measured["interfaces"]
        found["overhead"] = measured.get("overhead")
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
    found = {
        "compute_seconds": measured["compute"],
        "bulk_bytes_per_second": rate,
        "optimum_seconds": best,
        "optimum": best / median,
    }
    if case.contender == "gradsum":
        found["predicted"] = _simulated(case, shape, link, barrier=case.barrier) / median
    return found


def _simulated(case: Case, shape: Profile, link: float, *, barrier: bool) -> float:
    """Seconds of a step."""
    cluster = Cluster.equal(case.workers, case.servers, link, latency=LATENCY, frame=FRAME)
    schedule = SCHEDULES[case.settings.get("SCHEDULE", "gradsum")]
    return simulate(shape, cluster, schedule, barrier=barrier).seconds


def _transformer(
    case: Case, measured: dict[str, Any], link: float, median: dict[str, float]
) -> dict[str, Any]:
    """What going across the barrier gained, and what the simulator says of it."""
    shape = parse(json.dumps(measured["profile"]), "the measured profile")
    steps = [_simulated(case, shape, link, barrier=barrier) for barrier in (True, False)]
    gain, predicted = median["barrier"] / median["gradsum"], steps[0] / steps[1]
    return {
        "compute_seconds": shape.seconds,
        "nbytes": shape.nbytes,
        "simulated_seconds": dict(zip(("barrier", "gradsum"), steps, strict=True)),
        "gain": gain,
        "predicted_gain": predicted,
        "as_predicted": 1 - abs(gain / predicted - 1),
    }


def _placement(case: Case, measured: dict[str, Any], rounds: int) -> float:
    """1 less the largest relative difference between a server's bytes and the formula's."""
    own, extra = shares([1.0] * case.workers, [1.0] * case.servers)
    n, whole = case.workers, case.nbytes * rounds * measured["overhead"]
    wanted = {f"w{rank}": (1 + (n - 2) * part) * whole for rank, part in enumerate(own)}
    wanted |= {f"c{number}": n * part * whole for number, part in enumerate(extra)}
    seen = measured["interfaces"]
    worst = max(
        abs(seen[node][way] / nbytes - 1)
        for node, nbytes in wanted.items() for way in ("received", "sent")
    )  # fmt: skip
    return 1 - float(worst)


def reached(found: dict[str, Any]) -> bool:
    """Whether everything owed was reached, with no wrong element."""
    return not found["wrong"] and all(
        name in found and (found[name] <= value if name in _AT_MOST else found[name] >= value)
        for name, value in found["owed"].items()
    )


def _ours(run: dict[str, Any]) -> float:
    times: dict[str, float] = run["median_seconds"]
    return times.get("gradsum", max(times.values()))


def merge(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median run by our time; with the spread of every figure over the runs."""
    ordered = sorted(runs, key=_ours)
    chosen = dict(ordered[len(ordered) // 2])
    for name in SHOWN:
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
        for name in SHOWN if name in found
    ]  # fmt: skip
    if "settled" in found:
        shown.append("settled " + ", ".join(f"{each * 1e3:.1f} ms" for each in found["settled"]))
    notes = ["" if reached(found) else "NOT REACHED"]
    notes.append(f"{found['wrong']} WRONG ELEMENTS" if found["wrong"] else "")
    notes.append("processor-bound" if found.get("bound_by_processor") else "")
    rest = "  ".join(filter(None, [*shown, f"idle {found['idle']:.0%}", *notes]))
    return f"{found['case']:28} {times}  {rest}"
