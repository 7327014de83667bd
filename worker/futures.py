"""Torch futures of rounds: for code that waits in C++ and not on our handles.

Rules: a future is set by the session's thread when its round is over. What ended a round reaches
C++ as an error with the whole message: torch makes one of an exception in a callback, and of no
other, so every future is handed out behind one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from gradsum.worker.face import Handle

T = TypeVar("T")


def future_of(
    handle: Handle, result: Callable[[], T], device: torch.device
) -> torch.futures.Future[T]:
    """``result()`` once the round is over; it waits for streams of ``device`` if that has any."""
    devices: list[Any] = [device] if device.type != "cpu" else []
    raw: torch.futures.Future[Any] = torch.futures.Future(devices=devices)

    def settle() -> None:
        try:
            handle.wait(0.0)
            raw.set_result(result())
        except Exception as error:
            raw.set_exception(error)

    handle.tell(settle)
    return raw.then(lambda done: cast(T, done.value()))
