"""Starts services and a crew of worker processes for scenarios, and reads what came of them.

Importing torch takes seconds, so one crew plays all scenarios: each as a job of its own, on the
service that it names. Services stand while the crew plays; at the end they must be alive, have
logged no error, and end with 0 when told to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.e2e.stage import Place, Scenario

ROOT = Path(__file__).resolve().parents[2]
PLAY = Path(__file__).with_name("play.py")
START_LIMIT = 30.0
END_LIMIT = 10.0
_FOREIGN = ("GRADSUM_", "SLURM_", "TORCHELASTIC_", "JOB_COMPLETION_INDEX", "RANK", "WORLD_SIZE",
            "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")  # fmt: skip


class Service(NamedTuple):
    """A coordinator and its servers: settings of the daemons and of the workers."""

    servers: int = 2
    settings: Mapping[str, Any] = MappingProxyType({})
    both: Mapping[str, Any] = MappingProxyType({})  # for daemons and workers


SERVICES: Mapping[str, Service] = MappingProxyType(
    {
        "alone": Service(servers=0),  # no processes at all: local mode
        "plain": Service(),
        "one server": Service(servers=1),
        "three servers": Service(servers=3),
        "ordered": Service(settings={"deterministic": 1}),
        "unpacked": Service(settings={"pack_bytes": 0}),
        "slices of 64": Service(settings={"slice_bytes": 64, "pack_bytes": 64}),
        "slices of 10": Service(servers=1, settings={"slice_bytes": 10}),
        "slices of 4097": Service(servers=1, settings={"slice_bytes": 4097}),
        "slices of 3": Service(servers=1, settings={"slice_bytes": 3}),
        "tiny credit": Service(
            settings={"slice_bytes": 65536}, both={"credit_bytes": 1024, "skew_bytes": 1024}
        ),
        "huge": Service(servers=1, settings={"slice_bytes": 10**18}, both={"credit_bytes": 10**18}),
    }
)


def _environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """This process's environment without what could change a job, plus settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return clean | {f"GRADSUM_{name.upper()}": str(value) for name, value in settings.items()}


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-6000:] if path.exists() else ""


class Process:
    """A child whose output goes to a file; ended by its id."""

    def __init__(self, words: Iterable[str], log: Path, env: dict[str, str]) -> None:
        self.log = log
        with log.open("wb") as out:
            self.child = subprocess.Popen(
                list(words), stdout=out, stderr=subprocess.STDOUT, env=env, cwd=log.parent,
                start_new_session=True,
            )  # fmt: skip

    def end(self) -> int:
        """Ask it to end; the exit code."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGCONT)
            self.child.terminate()
        try:
            return self.child.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait(END_LIMIT)
            return -signal.SIGKILL


@dataclass
class Outcome:
    """What a crew reported: by scenario and rank, and what was wrong around it."""

    records: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    logs: dict[int, str] = field(default_factory=dict)  # of the workers


class Daemons:
    """The services of one crew."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, Process] = {}
        self._files: dict[tuple[str, int], Path] = {}
        self._servers: dict[tuple[str, int], tuple[int, ...]] = {}

    def start(self, wanted: set[tuple[str, int]]) -> dict[tuple[str, int], Place]:
        """Coordinators first, all at once, then their servers."""
        for name, ranks in sorted(wanted):
            if SERVICES[name].servers:
                self._coordinator(name, ranks)
        deadline = time.monotonic() + START_LIMIT
        while not all(file.exists() for file in self._files.values()):
            assert time.monotonic() < deadline, f"coordinators did not start: {self.complaints()}"
            time.sleep(0.02)
        return {place: self._place(*place) for place in sorted(wanted)}

    def _run(self, label: str, words: list[str], settings: Mapping[str, Any]) -> Process:
        log = self._folder / f"{label}.log".replace(" ", "-")
        command = [sys.executable, "-m", "gradsum", *words]
        process = Process(command, log, _environment(settings))
        self._processes[label] = process
        return process

    def _coordinator(self, name: str, ranks: int) -> None:
        service = SERVICES[name]
        label = f"coordinator {name} {ranks}"
        file = self._folder / f"{name}-{ranks}.address".replace(" ", "-")
        words = ["coordinator", "--bind", "127.0.0.1:0", "--port-file", str(file)]
        words += ["--workers", str(ranks), "--servers", str(service.servers)]
        self._run(label, words, dict(service.settings) | dict(service.both))
        self._files[name, ranks] = file

    def _place(self, name: str, ranks: int) -> Place:
        service = SERVICES[name]
        if not service.servers:
            return Place(None, (), {})
        address = self._files[name, ranks].read_text().strip()
        words = ["server", "--coordinator", address]
        settings = dict(service.settings) | dict(service.both)
        servers = [
            self._run(f"server {name} {ranks} {index}", words, settings).child.pid
            for index in range(service.servers)
        ]
        return Place(address, tuple(servers), dict(service.both))

    def complaints(self) -> list[str]:
        """Daemons that have ended, or logged an error."""
        found = []
        for label, process in self._processes.items():
            text = _tail(process.log)
            if process.child.poll() is not None:
                found.append(f"{label} ended with {process.child.returncode}: {text}")
            elif "ERROR" in text or "Traceback" in text:
                found.append(f"{label} logged an error: {text}")
        return found

    def end(self) -> list[str]:
        """End all, servers before coordinators; complaints about exit codes."""
        order = sorted(self._processes, key=lambda label: label.startswith("coordinator"))
        codes = {label: self._processes[label].end() for label in order}
        return [f"{label} ended with {code}" for label, code in codes.items() if code]


def run(scenarios: list[Scenario], folder: Path, limit: float) -> Outcome:
    """Play scenarios by as many processes as the largest of them needs; ``limit`` in seconds."""
    (folder / "meetings").mkdir(parents=True)
    daemons = Daemons(folder)
    crew: list[Process] = []
    try:
        places = daemons.start({(s.service, s.ranks) for s in scenarios})
        task = folder / "task.json"
        order = sorted(scenarios, key=lambda s: s.ranks)  # few ranks first: the others wait once
        tasks = [(s.name, places[s.service, s.ranks]) for s in order]
        _write(task, folder, limit, tasks, shared=False)
        crew = [_worker(rank, task, folder) for rank in range(max(s.ranks for s in scenarios))]
        outcome = _watch(crew, folder, limit)
        outcome.complaints += daemons.complaints()
    finally:
        for worker in crew:
            worker.end()
        ends = daemons.end()
    outcome.complaints += ends
    return outcome


def _write(
    task: Path, folder: Path, limit: float, tasks: list[tuple[str, Place]], shared: bool
) -> None:
    content = {"folder": str(folder), "limit": limit, "shared": shared, "scenarios": tasks}
    task.write_text(json.dumps(content))


def launch(scenarios: list[Scenario], folder: Path, limit: float) -> Outcome:
    """Play scenarios of two ranks, all in one job, under ``gradsum launch --standalone``."""
    (folder / "meetings").mkdir(parents=True)
    task = folder / "task.json"
    _write(task, folder, limit, [(s.name, Place(None, (), {})) for s in scenarios], shared=True)
    words = ["launch", "--standalone", "--nproc-per-node", "2", "--servers", "2", "--"]
    command = [sys.executable, "-m", "gradsum", *words, sys.executable, str(PLAY), str(task)]
    launcher = Process(command, folder / "launch.log", _environment({}))
    try:
        return _watch([launcher], folder, limit)
    finally:
        launcher.end()


def _worker(rank: int, task: Path, folder: Path) -> Process:
    env = _environment({}) | {
        "RANK": str(rank),
        "PYTHONHASHSEED": str(rank + 1),  # ranks whose hashes differ must agree all the same (C46)
        "OMP_NUM_THREADS": "1",
    }
    return Process([sys.executable, str(PLAY), str(task)], folder / f"worker.{rank}.log", env)


def _watch(crew: list[Process], folder: Path, limit: float) -> Outcome:
    deadline = time.monotonic() + limit
    outcome = Outcome()
    while any(worker.child.poll() is None for worker in crew):
        if time.monotonic() > deadline:
            outcome.complaints.append(f"the crew was not done after {limit} s")
            break
        time.sleep(0.05)
    for number, child in enumerate(crew):
        outcome.logs[number] = _tail(child.log)
        if child.child.poll() not in (0, None):
            outcome.complaints.append(f"{child.log.stem} ended with {child.child.returncode}")
    for results in folder.glob("results.*"):
        for line in results.read_text().splitlines():
            record = json.loads(line)
            outcome.records[record["name"], int(results.suffix[1:])] = record
    return outcome
