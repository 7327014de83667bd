"""The torch.distributed backend "gradsum": sums through the service, everything else over Gloo.

A process group is Gloo's, with ``allreduce`` taken over: torch's own classes find the rest where it
always is. What torch lets Python classes override it calls with Python's lock held, and if they do
not, its own code too: with Gloo's threads that is a deadlock (torch 2.13). So all of that goes to a
plain group, which lets the lock go. Only this file knows what differs between torch's versions.
Rules: groups of all workers are summed by the service, in the order of their making,
which torch asks to be the same on all ranks; smaller groups are Gloo's altogether; so is what has
no sum here or, as integer means, none in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup, ProcessGroupGloo, ReduceOp

from gradsum.errors import UsageError
from gradsum.worker.client import Client
from gradsum.worker.collectives import AllReduce, Sum
from gradsum.worker.futures import future_of

NAME: Final = "gradsum"
PLAIN: Final = """all_gather_single_coalesced all_to_all_single allgather
allgather_into_tensor_coalesced alltoall_base barrier broadcast recv reduce_scatter
reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced send""".split()
"""What torch calls with the lock held, beside sums; newer and older names."""

DEVICES: Final = ["cpu", "cuda"]


def _plainly(name: str) -> Callable[..., Any]:
    def call(self: GradsumGroup, *args: Any, **more: Any) -> Any:
        return getattr(self._plain, name)(*args, **more)

    return call


_Plain = type(
    "_Plain", (ProcessGroup,), {n: _plainly(n) for n in PLAIN if hasattr(ProcessGroup, n)}
)


class SumWork(dist.Work):
    """A call on its way, as torch waits for it."""

    def __init__(self, sums: list[Sum], timeout: timedelta) -> None:
        super().__init__()
        self._sums = sums
        self._timeout = timeout
        self._done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the sums are in the tensors."""
        if not self._done:
            for each in self._sums:
                each.handle.wait((timeout or self._timeout).total_seconds())
                each.finish()
            self._done = True
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return all(each.handle.done() for each in self._sums)

    def is_success(self) -> bool:
        """Whether the sums are there."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What ended a finished call, if anything."""
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return [each.tensor for each in self._sums]

    def get_future(self) -> torch.futures.Future[Any]:
        """For callers that wait in C++."""
        last, tensors = self._sums[-1], self.result()
        device = tensors[0].device
        if len(self._sums) == 1:
            return future_of(last.handle, lambda: [last.finish()], device)
        parts = [future_of(each.handle, each.finish, device) for each in self._sums]
        return torch.futures.collect_all(parts).then(lambda _: tensors)


class GradsumGroup(_Plain):  # type: ignore[valid-type, misc]
    """A process group of all workers, or of some of them."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, sums: AllReduce | None,
        leave: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        """sums: None for a group that the service does not sum. leave: what its end calls for."""
        super().__init__(rank, size)
        self._leave = leave
        self._store = store
        self._timeout = timeout
        self._sums = sums
        self._plain = ProcessGroup(store, rank, size)
        gloo = ProcessGroupGloo(store, rank, size, timeout)
        gloo._set_sequence_number_for_group()
        for group in (self, self._plain):
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
            for device in DEVICES:
                group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, gloo)

    def getBackendName(self) -> str:
        """What torch shows of the group."""
        return NAME

    def shutdown(self) -> None:
        """The end of the group, and of the membership that it has brought."""
        self._plain.shutdown()
        if self._leave is not None:
            self._leave()

    def get_group_store(self) -> Store:
        """Where the group's ranks find each other."""
        return self._store

    def allreduce(self, tensors: Any, opts: Any = None, **more: Any) -> Any:
        """Sum or mean by the service where it can, else by Gloo."""
        listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        work = self._summed(listed, opts)
        return work or self._plain.allreduce(tensors, *([] if opts is None else [opts]), **more)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """The same of several tensors."""
        if opts is None:
            opts = dist.AllreduceCoalescedOptions()
        return self._summed(tensors, opts) or self._plain.allreduce_coalesced(tensors, opts)

    def _summed(self, tensors: list[torch.Tensor], opts: Any) -> SumWork | None:
        """The call under way in the service, if it is one for the service."""
        asked = ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        average = asked == ReduceOp.AVG
        sums = self._sums
        if sums is None or not (average or asked == ReduceOp.SUM):
            return None
        if not tensors or not all(sums.takes(tensor, average=average) for tensor in tensors):
            return None
        begun = [sums.begin(tensor, average=average) for tensor in tensors]
        return SumWork(begun, _timeout(opts) or self._timeout)


def _timeout(opts: Any) -> timedelta | None:
    """The caller's own, if one was given."""
    given: timedelta | None = getattr(opts, "timeout", None)
    return given if given is not None and given > timedelta(0) else None


def register(join: Callable[[int, int], tuple[Client, Callable[[], None] | None]]) -> None:
    """Make torch know the backend. join: the membership of (rank, size), made if need be, and then
    what ends it."""

    def create(options: Any, _: Any) -> GradsumGroup:
        ranks = options.global_ranks_in_group
        rank, size = options.group_rank, options.group_size
        client, leave = join(rank, size)
        whole = size == client.session.size and list(ranks or range(size)) == list(range(size))
        if whole and rank != client.session.rank:
            raise UsageError(
                f"the process group has this process as rank {rank}, gradsum as rank "
                f"{client.session.rank}",
                hint="start both with the same ranks: RANK and WORLD_SIZE are read by both",
            )
        sums = AllReduce(client, client.session.next_group("group")) if whole else None
        return GradsumGroup(options.store, rank, size, options.timeout, sums, leave)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=DEVICES)
