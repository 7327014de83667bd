"""Calls that are not allowed, made by a program that uses torch; run by two ranks.

Each must raise the right error at once, with the words that tell what to do instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import gradsum
from gradsum.errors import ConfigError, GradsumError, NotBuilt, UsageError


def refused(work: Callable[[], Any], kind: type[BaseException], *words: str) -> None:
    """The call raises exactly this kind of error, and its text holds all the words."""
    try:
        got = work()
    except BaseException as error:
        if type(error) is not kind or not all(word in str(error) for word in words):
            raise AssertionError(f"expected {kind.__name__} {words}") from error
    else:
        raise AssertionError(f"expected {kind.__name__} {words}, got {got!r}")


def before_init() -> None:
    """Nothing works without a membership, and each call says so."""
    ones = torch.ones(3)
    calls: list[Callable[[], Any]] = [
        lambda: gradsum.push_pull(ones, name="w"), gradsum.rank, gradsum.size, gradsum.barrier,
        lambda: gradsum.declare("w"), lambda: gradsum.broadcast_parameters({"w": ones}),
        lambda: gradsum.broadcast_object(1), gradsum.mark_step, gradsum.join,
        lambda: gradsum.DistributedOptimizer(torch.optim.SGD([ones.requires_grad_()], 0.1)),
    ]  # fmt: skip
    for call in calls:
        refused(call, UsageError, "gradsum.init()")
    gradsum.shutdown()


def names() -> None:
    """Names and policies that are unknown or of a later release."""
    ones = torch.ones(3)
    refused(lambda: gradsum.push_pull(ones), UsageError, "name")
    refused(lambda: gradsum.push_pull(ones, name=""), UsageError, "name")
    refused(lambda: gradsum.poll("w"), TypeError, "push_pull_async")  # type: ignore[arg-type]
    refused(lambda: gradsum.synchronize(7), TypeError, "push_pull_async")  # type: ignore[arg-type]
    refused(lambda: gradsum.pushpull, AttributeError, "pushpull")
    refused(lambda: gradsum.suspend, AttributeError, "not built yet")
    later = gradsum.Policy(route="peer")
    refused(lambda: gradsum.declare("later", later), NotBuilt, "route='peer'", "'later'")
    gradsum.declare("w", gradsum.Policy())
    refused(lambda: gradsum.declare("w", gradsum.Policy(kind="broadcast", root=0)), UsageError, "w")
    for wrong in ("w" * 300, "w\udc80"):
        refused(partial(gradsum.push_pull, ones, name=wrong), UsageError, "name")


def again() -> None:
    """A second init changes nothing, with other settings it is refused."""
    gradsum.init()
    refused(lambda: gradsum.init(heartbeat=0.3), UsageError, "gradsum.shutdown()")
    refused(lambda: gradsum.init(hartbeat=0.3), ConfigError, "hartbeat")


def in_a_child() -> None:
    """A forked child has no membership, and its end does not disturb its parent's."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            refused(lambda: gradsum.push_pull(torch.ones(3), name="w"), UsageError, "fork")
            refused(gradsum.barrier, UsageError, "fork", "spawn")
            gradsum.shutdown()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise AssertionError(f"the child ended with {status}")


def works(value: float) -> None:
    """A sum over both ranks is right."""
    total = gradsum.push_pull(torch.full((3,), value + gradsum.rank()), average=False, name="w")
    if total.tolist() != [2 * value + 1] * 3:
        raise AssertionError(total)


def main() -> None:
    torch.set_num_threads(1)
    before_init()
    refused(lambda: gradsum.init(coordinator="nohost"), ConfigError, "HOST:PORT", "nohost")
    gradsum.init()
    works(1.0)
    again()
    names()
    in_a_child()
    works(2.0)
    gradsum.shutdown()
    gradsum.shutdown()
    refused(lambda: gradsum.push_pull(torch.ones(3), name="w"), UsageError, "gradsum.init()")
    gradsum.init()
    works(3.0)
    try:
        gradsum.push_pull(torch.ones(3, 2), name="w")
    except GradsumError as error:
        if "w" not in str(error):
            raise
    else:
        raise AssertionError("another shape for a name that is in use")
    gradsum.shutdown()
    print("all checked")


if __name__ == "__main__":
    main()
