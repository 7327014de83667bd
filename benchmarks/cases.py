"""What is measured: one line a figure.

A case says where it runs (``shm`` and ``loopback``: one host; ``links``: a lab), with how many
workers and servers, on which bytes, and against what. ``share`` is the part of the probed link that
a round uses, by the time that it would take at best; ``ratio`` is Gloo's time by ours. A case with
a ``model`` trains its profile (benchmarks/training.py); ``optimum`` is the time that a step would
take with instant preemption and no overhead, by the time that it took; ``predicted`` compares it
with what the simulator says. ``placement``: how near the bytes at each interface are to the
formula. A ``program`` is another one of benchmarks/: ``urgent`` gives the p99 delay of an urgent
sum under a backlog, ``transformer`` what going across the barrier gains, measured by predicted.
``later``: links change while the job runs, after which as many rounds follow; ``settled`` are the
median seconds of the last steps before and at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from gradsum.scheduler.profiles import MODELS


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. Bytes are of one rank's tensors, rates of links in Mbit/s."""

    name: str
    place: str
    workers: int
    servers: int
    nbytes: int
    tensors: int = 1
    rate: float = 0.0
    congestion: str = "reno"
    wire: str = "fp32"
    form: str = "tensors"
    gloo: bool = True
    ddp: bool = False
    rounds: int = 20
    owed: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    busy: float = 1.0  # communication by computation
    contender: str = "gradsum"
    barrier: bool = False
    program: str = ""
    later: float = 0.0  # rate of the links of ``slowed`` nodes, or of all, for further rounds
    slowed: tuple[str, ...] = ()

    @property
    def best(self) -> float:
        """Seconds of a round by link rate B in bytes/s: factor of 1/B (BytePS, section 3)."""
        n, k, wire = self.workers, self.servers, 0.5 if self.wire != "fp32" else 1.0
        if n == 1:
            return self.nbytes * wire
        return wire * self.nbytes * 2 * n * (n - 1) / (n * n + k * n - 2 * k)

    def with_settings(self, **settings: str) -> Case:
        """The same under other settings, as GRADSUM_ variables."""
        return replace(self, settings={**self.settings, **settings})


def _links(n: int, k: int, rate: float, congestion: str, **owed: float) -> Case:
    name = f"links-n{n}-k{k}-{rate:g}-{congestion}"
    return Case(name, "links", n, k, 32_000_000, rate=rate, congestion=congestion, owed=owed,
                rounds=6)  # fmt: skip


def _training(
    model: str, busy: float, contender: str = "gradsum", nbytes: int = 32_000_000, **owed: float
) -> Case:
    barrier = contender == "fifo"
    policy = "" if contender == "gradsum" else f"-{contender}"
    return Case(
        f"train-{model}-{busy:g}{policy}", "links", 4, 4, nbytes, rate=200.0, model=model,
        busy=busy, contender="ddp" if contender == "ddp" else "gradsum", barrier=barrier,
        settings={} if contender == "ddp" else {"SCHEDULE": contender}, rounds=10, owed=owed,
    )  # fmt: skip


_ALL: Final = (
    Case("shm-100", "shm", 2, 1, 100_000_000, owed={"ratio": 2.0}),
    Case("shm-100-gradients", "shm", 2, 1, 100_000_000, form="gradients", owed={"ratio": 3.0},
         settings={"SHARE_GRADIENTS": "1"}),
    Case("shm-25", "shm", 4, 2, 25_000_000, owed={"ratio": 2.0}),
    Case("shm-small", "shm", 2, 1, 4_096_000, tensors=1000, owed={"ratio": 20.0}),
    Case("shm-4k", "shm", 2, 1, 4096, rounds=300, owed={"ratio": 1.67}),
    Case("tcp-100", "loopback", 2, 1, 100_000_000, ddp=True, owed={"ratio": 0.70}),
    Case("tcp-25", "loopback", 4, 2, 25_000_000, owed={"ratio": 0.75}),
    Case("tcp-small", "loopback", 2, 1, 4_096_000, tensors=1000, owed={"ratio": 20.0}),
    Case("tcp-4m", "loopback", 2, 1, 4_096_000, rounds=40),
    _links(4, 4, 200, "reno", share=0.96, ratio=1.50),
    _links(4, 4, 500, "reno", share=0.94),
    _links(4, 4, 200, "bbr", share=0.88),
    _links(4, 4, 500, "bbr", share=0.86),
    _links(4, 1, 200, "reno", ratio=1.10),
    _links(4, 2, 200, "reno", ratio=1.22),
    _links(4, 0, 200, "reno", ratio=0.98),
    _links(2, 2, 200, "reno"),
    _links(3, 3, 200, "reno"),
    _links(5, 5, 200, "reno"),
    _links(6, 6, 200, "reno"),
    replace(_links(4, 4, 200, "reno"), name="links-bf16", wire="bf16", gloo=False),
    replace(_links(4, 4, 200, "reno"), name="links-fp16", wire="fp16", gloo=False),
    replace(_links(4, 4, 200, "reno"), name="links-deterministic", gloo=False,
            settings={"DETERMINISTIC": "1"}),
    *(_training(model, busy, optimum=1 / 1.05)
      for model in MODELS for busy in (0.5, 1.0, 2.0)),
    *(_training("vgg16", busy, contender)
      for busy in (1.0, 2.0) for contender in ("fifo", "p3", "bytescheduler", "ddp")),
    *(_training("vgg16", 0.1, contender, nbytes=4_000_000) for contender in ("gradsum", "fifo")),
    *(replace(_links(4, k, 500, "reno", placement=0.99), name=f"placement-k{k}", gloo=False,
              settings={"SLICE_BYTES": "64KiB"})  # from the first round on
      for k in range(5)),
    replace(_training("vgg16", 1.0), name="tune", rate=500.0, later=100.0, rounds=60, owed={},
            settings={"TUNE": "1"}),
    replace(_training("vgg16", 1.0), name="unequal", later=100.0, slowed=("c3",), rounds=20,
            owed={}),
    Case("urgent", "links", 4, 4, 32_000_000, rate=500.0, rounds=40, program="urgent",
         owed={"urgent_p99": 0.025}),
    Case("transformer", "links", 4, 4, 7_315_968, rate=200.0, rounds=30, program="transformer",
         owed={"as_predicted": 0.9}, settings={"DETERMINISTIC": "1"}),
)  # fmt: skip

CASES: Final[Mapping[str, Case]] = MappingProxyType({case.name: case for case in _ALL})
