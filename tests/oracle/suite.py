"""PyTorch's test class, on the backend that ORACLE_BACKEND names.

Decorators decide while the class is made, and are to decide as for gloo; the tests themselves then
find a name that is gradsum's and equals gloo's, so that none of them takes another way.
"""

from __future__ import annotations

import os
from typing import Any

import torch

BACKEND = os.environ.get("ORACLE_BACKEND", "gloo")
os.environ.update(BACKEND="gloo", WORLD_SIZE=os.environ.get("ORACLE_RANKS", "3"))
os.environ.setdefault("TEMP_DIR", "/tmp")

from torch.testing._internal.distributed import distributed_test as theirs  # noqa: E402

if BACKEND == "gradsum":
    import gradsum.torch  # noqa: F401


class Name(str):
    """"gradsum", which equals "gloo" too."""

    def __eq__(self, other: object) -> bool:
        return other in ("gloo", "gradsum")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


theirs.BACKEND = Name(BACKEND) if BACKEND == "gradsum" else BACKEND


class Oracle(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
    """Every rank is a fork of this process, so that torch is imported once."""

    def setUp(self) -> None:
        super().setUp()  # type: ignore[no-untyped-call]
        os.environ["GRADSUM_JOB"] = self._testMethodName
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, *rest: Any, **more: Any) -> None:
        torch.set_num_threads(1)
        super()._run(rank, test_name, *rest, **more)  # type: ignore[no-untyped-call]
