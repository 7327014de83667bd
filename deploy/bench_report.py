"""What ``gradsum bench`` says about its measurements, as JSON and as a table.

Goodput: the bytes of one rank's float32 tensors by the median time. Share of the probed link: what
one rank's link carries in each direction, by the median time and by the rate of the probe: of the
memory copy if all links are shared memory, else of the TCP stream. gradsum's link carries every
byte once each way, half as many with a half type on the wire; a ring's carries 2 (n - 1) / n.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

TITLES: Final = {"gloo": "Gloo", "ddp": "DDP's buckets over Gloo"}
_HEAD: Final = ("", "median", "p99", "goodput", "of link", "idle CPU", "own CPU", "faults")
_PROBES: Final = {
    "stream_gb_per_second": "TCP stream",
    "copy_gb_per_second": "memory copy",
    "add_gb_per_second": "memory add",
}


class Job(NamedTuple):
    """What was measured. ``servers`` 0: not known."""

    workers: int
    servers: int
    total_bytes: int  # of one rank's tensors
    tensors: int
    form: str
    wire: str
    transport: str  # as asked for
    warmup: int
    rounds: int  # without the warm-up


class Figures(NamedTuple):
    """The timed rounds of one contender. Seconds, and 10^9 bytes per second."""

    median: float
    p50: float
    p99: float
    goodput: float
    rounds: tuple[float, ...]


def figures(seconds: Sequence[float], total_bytes: int) -> Figures:
    """Of rounds that moved ``total_bytes`` each; percentiles are by nearest rank."""
    ordered = sorted(seconds)
    median = statistics.median(ordered)
    p50, p99 = (ordered[math.ceil(part * len(ordered)) - 1] for part in (0.5, 0.99))
    return Figures(median, p50, p99, total_bytes / median / 1e9, tuple(seconds))


def link_bytes(name: str, job: Job) -> float:
    """Bytes a round that one rank's link carries in each direction."""
    if name in TITLES:
        return 2 * (job.workers - 1) / job.workers * job.total_bytes
    return job.total_bytes * (1.0 if job.wire == "fp32" else 0.5)


def report(
    job: Job, measured: Mapping[str, Any], probe: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """What ``--json`` prints. measured: what a rank program writes with ``--result``."""
    contenders, links, usage = measured["contenders"], measured["links"], measured["usage"]
    found: dict[str, Any] = {
        "workers": job.workers,
        "servers": job.servers or len(links),
        "bytes": job.total_bytes,
        "tensors": job.tensors,
        "form": job.form,
        "wire": job.wire,
        "transport": job.transport,
        "links": links,
        "warmup": job.warmup,
        "rounds": job.rounds,
        "wrong_elements": {name: each["wrong"] for name, each in contenders.items()},
    }
    if probe is not None:
        found["probe"] = dict(probe)
    for name, each in contenders.items():
        timed = figures(each["seconds"][job.warmup :], job.total_bytes)
        carried = link_bytes(name, job) / timed.median / 1e9
        found[name] = {
            "median_seconds": timed.median,
            "p50_seconds": timed.p50,
            "p99_seconds": timed.p99,
            "goodput_gb_per_second": timed.goodput,
            "link_gb_per_second": carried,
            **{what: values[name] for what, values in usage.items()},
            "round_seconds": timed.rounds,
        }
        if probe is not None:
            found[name]["link_share"] = carried / probe[_probed(name, links)]
        if name in TITLES:
            found[f"rate_against_{name}"] = timed.median / found["gradsum"]["median_seconds"]
    return found


def _probed(name: str, links: Mapping[str, str]) -> str:
    shared = name not in TITLES and set(links.values()) == {"shm"}
    return "copy_gb_per_second" if shared else "stream_gb_per_second"


def table(found: Mapping[str, Any]) -> str:
    """The report for people."""
    used = Counter(found["links"].values())
    over = ", ".join(f"{kind} x {n}" for kind, n in sorted(used.items())) or found["transport"]
    rows = [_HEAD, *(_row(name, found[name]) for name in found["wrong_elements"])]
    size = f"{found['bytes'] / 1e6:g} MB" if found["bytes"] >= 1e5 else f"{found['bytes']} bytes"
    machines = [_many(found["workers"], "worker")]
    machines += [_many(found["servers"], "server")] if found["servers"] else []
    lines = [
        f"push-pull: {', '.join(machines)}, {size} of float32 in "
        + _many(found["tensors"], "tensor"),
        f"form {found['form']}, wire {found['wire']}, transport {over}; "
        f"{found['rounds']} rounds after {found['warmup']} of warm-up",
        *(f"{row[0]:8}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows),
    ]
    if "probe" in found:
        probes = [f"{name} {rate(found['probe'][key])}" for key, name in _PROBES.items()]
        lines.append("probed: " + ", ".join(probes))
    lines += [
        f"gradsum runs at {found[f'rate_against_{name}']:.2f} of the rate of {title}"
        for name, title in TITLES.items()
        if f"rate_against_{name}" in found
    ]
    if not any(found["wrong_elements"].values()):
        lines.append("every element of every round is right")
    return "\n".join(lines)


def _row(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    share = f"{row['link_share']:.0%}" if "link_share" in row else "-"
    return (
        name,
        duration(row["median_seconds"]),
        duration(row["p99_seconds"]),
        rate(row["goodput_gb_per_second"]),
        share,
        f"{row['idle'][0]:.0%}",
        duration(max(row["cpu_seconds"])),
        f"{max(row['minor_faults']):.0f}",
    )


def _many(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """For people: ``412.3 us``, ``12.34 ms``, ``1.234 s``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.3f} s"


def rate(gigabytes: float) -> str:
    """10^9 bytes per second for people: ``1.234 GB/s``, ``12.34 MB/s``."""
    return f"{gigabytes:.3f} GB/s" if gigabytes >= 0.1 else f"{gigabytes * 1e3:.2f} MB/s"
