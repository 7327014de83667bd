"""One rank that asks for urgent sums while a backlog of others fills its link, both ways.

The backlog is several large tensors, pushed again as soon as their sums are in; the urgent tensor
is a small one with the highest priority. Its delay, on rank 0, is the time from the last rank's
push to the sum: it waits for what is under way out and in. Ranks of one machine have one clock, and
say in the tensor when they pushed, and whether they have done their rounds of backlog: all stop
together when everybody has. Every element is checked.
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

import torch

from benchmarks.rank import arguments, publish
from gradsum.worker import api
from gradsum.worker.default import default

TENSORS = 8
ELEMENTS = 1024
URGENT = 1 << 20
PAUSE = 0.02
WITHIN = 60.0


class Backlog(threading.Thread):
    """``rounds`` times all tensors, never waiting between them but for each one's last sum."""

    def __init__(self, nbytes: int, rounds: int, *, steps: bool = False) -> None:
        """steps: each round is one, where slices may change."""
        super().__init__(daemon=True)
        self._steps = steps
        self._rounds = rounds
        self._tensors = [torch.zeros(nbytes // TENSORS // 4) for _ in range(TENSORS)]
        self._whole = torch.arange(nbytes // TENSORS // 4, dtype=torch.float32) % 7
        self.wrong = 0
        self.seconds = 0.0
        self.done = False
        self.error: BaseException | None = None

    def run(self) -> None:
        """All rounds; ``wrong`` counts elements that are not the sum."""
        try:
            self._run()
        except BaseException as error:
            self.error = error
        self.done = True

    def _run(self) -> None:
        start, handles = time.perf_counter(), [self._push(place) for place in range(TENSORS)]
        for number in range(self._rounds):
            for place, tensor in enumerate(self._tensors):
                api.synchronize(handles[place])
                ranks = api.size() * (api.size() + 1) / 2
                self.wrong += int((tensor != ranks * self._whole).sum())
                if number + 1 < self._rounds and not self._steps:
                    handles[place] = self._push(place)
            if self._steps and number + 1 < self._rounds:
                api.mark_step()
                handles = [self._push(place) for place in range(TENSORS)]
        self.seconds = time.perf_counter() - start

    def _push(self, place: int) -> Any:
        torch.mul(self._whole, api.rank() + 1, out=self._tensors[place])
        return api.push_pull_async_inplace(
            self._tensors[place], average=False, name=f"backlog.{place}", priority=-place
        )


def measure(backlog: Backlog) -> tuple[list[float], int]:
    """Delays of urgent sums until everybody's backlog is done, and wrong elements."""
    delays, wrong, number, over = [], 0, 0, False
    while not over:
        time.sleep(PAUSE)
        mine = torch.full((ELEMENTS,), float(api.rank() + number % 5), dtype=torch.float64)
        mine[: 1 + api.size()] = 0.0
        mine[0] = float(backlog.done)
        mine[1 + api.rank()] = time.perf_counter()
        handle = api.push_pull_async(mine, average=False, name="urgent", priority=URGENT)
        total = api.synchronize(handle)
        delays.append(time.perf_counter() - float(total[1 : 1 + api.size()].max()))
        ranks = range(api.size())
        rest = total[1 + api.size() :]
        wrong += int((rest != float(sum(rank + number % 5 for rank in ranks))).sum())
        over, number = total[0] == api.size(), number + 1
    return delays, wrong


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = arguments(__doc__)
    parser.add_argument("--bytes", type=int, required=True, help="of the backlog, in each step")
    return parser.parse_args()


def main() -> None:
    """Measure, check, report."""
    args = parse()
    torch.set_num_threads(1)
    api.init()
    warm = Backlog(args.bytes, args.warmup, steps=True)
    warm.run()
    backlog = Backlog(args.bytes, args.steps)
    backlog.start()
    delays, wrong = measure(backlog)
    backlog.join(WITHIN)
    for error in filter(None, (warm.error, backlog.error)):
        raise error
    mine = torch.tensor([float(wrong + warm.wrong + backlog.wrong)])
    total = api.push_pull(mine, average=False, name="wrong")
    publish(args.result, {
        "contenders": {"gradsum": {"seconds": delays, "wrong": int(total.item())}},
        "links": default.get().session.transports(),
        "backlog": args.bytes * args.steps / backlog.seconds,
    })  # fmt: skip
    api.barrier()
    api.shutdown()


if __name__ == "__main__":
    main()
