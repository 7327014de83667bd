"""Running a case: its processes, where they belong, and what they used.

On one host the standalone launcher starts everything. In a lab each worker and each CPU server has
a node of its own; with fewer CPU servers than workers every worker's node runs a server too, and
the placement decides what these carry. The coordinator is with the first worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.cases import Case
from benchmarks.links import Lab
from benchmarks.probe import link

WITHIN: Final = 900.0
_START: Final = 30.0
WARMUP: Final = 6
PORT: Final = 7700


class Failed(Exception):
    """A process of a case ended with an error; the text is its output."""


def environment(case: Case) -> dict[str, str]:
    """Of all processes of a case."""
    transport = {"shm": "shm", "loopback": "tcp", "links": "auto"}[case.place]
    settings = {"TRANSPORT": transport, "LOG_LEVEL": "WARNING", **case.settings}
    return os.environ | {"OMP_NUM_THREADS": "1"} | {f"GRADSUM_{k}": v for k, v in settings.items()}


def _later(result: Path) -> Path:
    """The file with which a program asks for the links' second rate."""
    return result.with_name("later")


def worker_words(case: Case, result: Path, compute: float = 0.0) -> list[str]:
    """One rank's program and its arguments. compute: seconds of a step of training."""
    common = ["--warmup", str(WARMUP), "--steps", str(case.rounds), "--result", str(result)]
    if case.program:
        words = ["-m", f"benchmarks.{case.program}", *common]
        return words + ["--bytes", str(case.nbytes)] * (case.program == "urgent")
    if case.model:
        words = ["-m", "benchmarks.training", *common, "--model", case.model]
        words += ["--bytes", str(case.nbytes), "--compute", str(compute)]
        words += ["--contender", case.contender]
        words += ["--later", str(_later(result))] * bool(case.later)
        return words + ["--barrier"] * case.barrier
    words = ["-m", "gradsum.deploy.bench_worker", "--bytes", str(case.nbytes)]
    words += ["--tensors", str(case.tensors), "--rounds", str(case.rounds + WARMUP)]
    words += ["--warmup", str(WARMUP), "--wire", case.wire, "--form", case.form]
    words += ["--result", str(result)]
    return words + ["--gloo"] * case.gloo + ["--ddp"] * case.ddp


def measure(case: Case) -> dict[str, Any]:
    """Run a case once; what rank 0 measured, and what the machine and the servers did meanwhile."""
    with tempfile.TemporaryDirectory(prefix="gradsum-bench-") as folder:
        result = Path(folder, "result.json")
        if case.place != "links":
            words = [sys.executable, "-m", "gradsum", "launch", "--standalone"]
            words += ["--nproc-per-node", str(case.workers), "--servers", str(case.servers)]
            words += ["-m", *worker_words(case, result)[1:2], *worker_words(case, result)[2:]]
            return _watched(case, [(words, "launcher")], [], result)
        colocated = case.servers < case.workers
        nodes = [f"w{i}" for i in range(case.workers)] + [f"c{i}" for i in range(case.servers)]
        with Lab(nodes, case.rate, case.congestion) as lab:
            before = link(lab)
            compute = case.best / before.goodput / case.busy
            members, servers = _members(case, lab, colocated, result, compute)
            started = {node: lab.counters(node) for node in nodes}
            found = _watched(case, members, servers, result, lab)
            ended = {node: lab.counters(node) for node in nodes}
            after = link(lab)
            found["link"] = {"before": before.goodput, "after": after.goodput}
            found["overhead"] = (before.overhead + after.overhead) / 2
            found["compute"] = compute
            found["interfaces"] = {
                node: {
                    what: getattr(ended[node], what) - getattr(started[node], what)
                    for what in ("received", "sent", "dropped")
                } for node in nodes
            }  # fmt: skip
            return found


Member = tuple[list[str], str]


def _members(
    case: Case, lab: Lab, colocated: bool, result: Path, compute: float
) -> tuple[list[Member], list[Member]]:
    gradsum = [sys.executable, "-m", "gradsum"]
    home = f"{lab.address('w0')}:{PORT}"
    hosts = [f"c{i}" for i in range(case.servers)]
    hosts += [f"w{i}" for i in range(case.workers)] if colocated else []
    coordinator = [*gradsum, "coordinator", "--bind", home, "--workers", str(case.workers)]
    coordinator += ["--servers", str(len(hosts)), "--insecure", "--once"]
    daemons: list[Member] = [(lab.command("w0", coordinator), "coordinator")]
    for host in hosts:
        words = [*gradsum, "server", "--coordinator", home, "--bind", lab.address(host)]
        daemons.append((lab.command(host, [*words, "--insecure", "--once"]), f"server {host}"))
    workers = []
    for rank in range(case.workers):
        given = {
            "RANK": rank, "WORLD_SIZE": case.workers, "GRADSUM_COORDINATOR": home,
            "MASTER_ADDR": lab.address("w0"), "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": "eth0",
        }  # fmt: skip
        words = ["env", *(f"{k}={v}" for k, v in given.items()), sys.executable]
        words += worker_words(case, result, compute)
        workers.append((lab.command(f"w{rank}", words), f"worker {rank}"))
    return workers, daemons


@contextmanager
def _running(members: Sequence[Member], env: dict[str, str]) -> Iterator[list[Any]]:
    started: list[Any] = []
    try:
        for words, _ in members:
            started.append(
                subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env)
            )
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def _watched(
    case: Case, workers: list[Member], daemons: list[Member], result: Path, lab: Lab | None = None
) -> dict[str, Any]:
    env, changed = environment(case), False
    idle = _Idle()
    with _running(daemons, env) as services, _running(workers, env) as ranks:
        usage = _Servers(case)
        deadline = time.monotonic() + WITHIN
        while any(process.poll() is None for process in ranks):
            usage.look([process.pid for process in (*services, *ranks)])
            if any(p.poll() for p in (*services, *ranks)) or time.monotonic() > deadline:
                break
            if lab is not None and not changed and _later(result).exists():
                changed = True
                for node in case.slowed or lab.nodes:
                    lab.set_rate(node, case.later)
            time.sleep(0.2)
        codes = {name: p.poll() for p, (_, name) in zip(ranks, workers, strict=True)}
        if any(codes.values()) or not result.exists():
            raise Failed(f"{case.name}: exit codes {codes}\n{_said(ranks)}{_said(services)}")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found | {"idle": idle.share(), "servers": usage.found}


def _said(processes: Sequence[Any]) -> str:
    parts = []
    for process in processes:
        process.terminate()
        try:
            parts.append(process.communicate(timeout=10)[1].decode(errors="replace")[-2000:])
        except subprocess.TimeoutExpired:
            process.kill()
    return "\n".join(parts)


class _Idle:
    """The idle share of all processors from now on."""

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def share(self) -> float:
        """Since the beginning."""
        now = psutil.cpu_times()
        return float((now.idle - self._before.idle) / max(sum(now) - sum(self._before), 1e-9))


class _Servers:
    """Processor time, memory and faults of the server processes, as seen last."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.found: dict[str, dict[str, float]] = {}

    def look(self, roots: Sequence[int]) -> None:
        """Note what the servers below these processes have used so far."""
        for root in roots:
            for process in _family(root):
                try:
                    if "server" in process.cmdline()[3:4]:
                        self._note(process)
                except (psutil.Error, OSError):
                    continue

    def _note(self, process: psutil.Process) -> None:
        times, memory = process.cpu_times(), process.memory_info()
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        known = self.found.setdefault(str(process.pid), {"rss_peak": 0.0})
        known["cpu_seconds"] = times.user + times.system
        known["minor_faults"] = float(fields[7])
        known["rss_peak"] = max(known["rss_peak"], float(memory.rss))


def _family(root: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
