"""gradsum sums the gradients of torch training jobs on separate CPU servers.

Nothing is loaded before it is used: servers and the coordinator import this package without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

__version__: Final = "0.1.0"

if TYPE_CHECKING:
    from gradsum.errors import GradsumError as GradsumError
    from gradsum.scheduler.policy import Policy as Policy
    from gradsum.worker.api import CrossBarrier as CrossBarrier
    from gradsum.worker.api import DistributedDataParallel as DistributedDataParallel
    from gradsum.worker.api import DistributedOptimizer as DistributedOptimizer
    from gradsum.worker.api import assert_in_sync as assert_in_sync
    from gradsum.worker.api import barrier as barrier
    from gradsum.worker.api import broadcast_object as broadcast_object
    from gradsum.worker.api import broadcast_optimizer_state as broadcast_optimizer_state
    from gradsum.worker.api import broadcast_parameters as broadcast_parameters
    from gradsum.worker.api import declare as declare
    from gradsum.worker.api import flush as flush
    from gradsum.worker.api import get_pushpull_speed as get_pushpull_speed
    from gradsum.worker.api import init as init
    from gradsum.worker.api import is_initialized as is_initialized
    from gradsum.worker.api import join as join
    from gradsum.worker.api import local_rank as local_rank
    from gradsum.worker.api import local_size as local_size
    from gradsum.worker.api import mark_step as mark_step
    from gradsum.worker.api import poll as poll
    from gradsum.worker.api import push_pull as push_pull
    from gradsum.worker.api import push_pull_async as push_pull_async
    from gradsum.worker.api import push_pull_async_inplace as push_pull_async_inplace
    from gradsum.worker.api import push_pull_inplace as push_pull_inplace
    from gradsum.worker.api import rank as rank
    from gradsum.worker.api import shutdown as shutdown
    from gradsum.worker.api import size as size
    from gradsum.worker.api import synchronize as synchronize
    from gradsum.worker.compression import Compression as Compression

_API: Final = """CrossBarrier DistributedDataParallel DistributedOptimizer assert_in_sync barrier
broadcast_object broadcast_optimizer_state broadcast_parameters declare flush get_pushpull_speed
init is_initialized join local_rank local_size mark_step poll push_pull push_pull_async
push_pull_async_inplace push_pull_inplace rank shutdown size synchronize""".split()
_HOMES: Final = dict.fromkeys(_API, "gradsum.worker.api") | {
    "Compression": "gradsum.worker.compression",
    "GradsumError": "gradsum.errors",
    "Policy": "gradsum.scheduler.policy",
}
_MODULES: Final = ("horovod", "torch")
_LATER: Final = ("suspend", "resume")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"gradsum.{name}")
    if name in _LATER:
        raise AttributeError(f"gradsum.{name} is not built yet; it comes in a later release")
    raise AttributeError(f"module 'gradsum' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
