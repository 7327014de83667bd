"""A random job of one seed: tensors, who pushes what when, and what changes at the fences."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import TensorSpec

WIRES = ("float32", "float32", "float64", "int32", "int64")


@dataclass(slots=True)
class Job:
    """Everything that follows from a seed; printed when a run fails."""

    seed: int
    workers: int
    servers: int
    window: int  # bytes
    skew: int  # bytes
    park: int  # bytes
    deterministic: bool
    slice_bytes: int
    weights: tuple[float, ...]
    ahead: int  # windows that may be submitted before the oldest is done
    chaos: float  # seconds of faults
    last: tuple[int, ...]  # rank -> its last window; then it joins
    early: list[TensorSpec] = field(default_factory=list)
    late: list[tuple[int, TensorSpec]] = field(default_factory=list)  # appended in this window
    absent: set[tuple[str, int, int]] = field(default_factory=set)  # (name, rank, version)
    fences: tuple[int, ...] = ()  # before these windows
    halves: bool = False
    placed: bool = False  # payloads stay in their sender's memory

    @property
    def windows(self) -> int:
        """Windows of the rank with the most data."""
        return max(self.last)

    def pushes(self, spec: TensorSpec, rank: int, version: int) -> bool:
        """Whether the rank pushes, rather than being ABSENT, joined or a reader."""
        if spec.policy.kind != "sum":
            return rank == spec.policy.root
        return version <= self.last[rank] and (spec.name, rank, version) not in self.absent


def draw(seed: int, *, halves: bool = False) -> Job:
    """The job of a seed."""
    rng = random.Random(seed)
    workers, servers = rng.choice((1, 2, 2, 3, 3, 4, 5)), rng.choice((1, 2, 2, 3, 4))
    windows = rng.randint(2, 5)
    uneven = rng.random() < 0.5
    job = Job(
        seed=seed, workers=workers, servers=servers,
        window=rng.choice((1, 300, 600, 2_000, 100_000)), skew=rng.choice((0, 300, 2_000, 100_000)),
        park=rng.choice((0, 64, 700, 100_000)), deterministic=rng.random() < 0.5,
        slice_bytes=rng.choice((8, 16, 24, 64)),
        weights=tuple(rng.choice((1.0, 1.0, 0.3, 2.5)) for _ in range(servers)),
        ahead=rng.choice((1, 1, 2, 3)), chaos=rng.uniform(1.0, 12.0),
        last=tuple(
            rng.randint(1, windows) if uneven else windows for _ in range(workers)
        ),
        halves=halves, placed=random.Random(~seed).random() < 0.5,
    )  # fmt: skip
    _tensors(job, rng)
    _absences(job, rng)
    count = rng.choice((0, 1, 1, 2))
    job.fences = tuple(sorted(rng.sample(range(1, job.windows + 1), min(count, job.windows))))
    return job


def _tensors(job: Job, rng: random.Random) -> None:
    wires = (*WIRES, "float16") if job.halves else WIRES
    for number in range(rng.randint(2, 7)):
        kind = rng.random()
        policy = Policy()
        if kind < 0.2:
            policy = Policy("broadcast", rng.randrange(job.workers))
        elif kind < 0.8:
            policy = Policy(pack="opt0")
        elements = rng.choice((0, 1, 2, 3, 5, 9, 17, 30))
        wire = rng.choice(wires)
        first = 1 if rng.random() < 0.8 else rng.randint(1, job.windows)
        spec = TensorSpec(f"t{number}", wire, wire, (elements,), policy, first)
        if rng.random() < 0.8:
            job.early.append(spec)
        else:
            job.late.append((rng.randint(1, first), spec))
    if not job.early:
        job.early.append(TensorSpec("t", "float32", "float32", (6,), Policy(), 1))


def _absences(job: Job, rng: random.Random) -> None:
    """Some ranks in some rounds, and some rounds without anybody (V5)."""
    specs = job.early + [spec for _, spec in job.late]
    for spec in specs:
        rate = rng.choice((0.0, 0.1, 0.5))
        for version in range(1, job.windows + 1):
            nobody = rng.random() < rate / 4
            for rank in range(job.workers):
                if nobody or rng.random() < rate:
                    job.absent.add((spec.name, rank, version))
