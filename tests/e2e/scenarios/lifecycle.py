"""Jobs that follow each other, what they leave behind, and many operations at once."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
import warnings
from typing import Any

import psutil
import torch
from torch import nn

import gradsum
from gradsum.errors import Refused, UsageError
from tests.e2e.models import mlp, parameter, push, seeded, sgd, square_loss, train, wrapped
from tests.e2e.scenarios.api_semantics import raises
from tests.e2e.stage import Stage, close, equal, scenario, until, within


@scenario(services=("one server",))
def c16_jobs_follow_each_other_on_one_service(stage: Stage) -> None:
    for _ in range(3):
        total = gradsum.push_pull(torch.full((4,), 7.0), average=False, name="w")
        equal(total, torch.full((4,), 14.0))
    start = time.monotonic()
    stage.again()
    total = gradsum.push_pull(torch.ones(2, 3), average=False, name="w")
    equal(total, torch.full((2, 3), 2.0))
    assert time.monotonic() - start < 5.0
    status = stage.status()
    equal((status["tensors"], status["bytes"]), (1, 24), "what the service holds")


@scenario(services=("one server",))
def c16_a_second_job_is_refused_at_once(stage: Stage) -> None:
    job = stage.status()["job"]
    settings = {"coordinator": stage.place.coordinator, "rank": stage.rank, "world_size": 2}
    from gradsum.config import load
    from gradsum.worker.session import Session

    with within(5.0, "the refusal"):
        raises(Refused, lambda: Session.open(load({**settings, "job": "another"}, {})), repr(job))
        raises(Refused, lambda: Session.open(load({**settings, "job": job}, {})))
    equal(gradsum.push_pull(torch.ones(1), average=False, name="w").item(), 2.0)


@scenario()
def c41_a_skipped_step_leaves_nothing_in_flight(stage: Stage) -> None:
    for warm in (0, 3):
        p = parameter(1.0)
        optimizer = sgd(p, lr=1.0)
        for _ in range(warm):  # until hooks push during backward
            optimizer.zero_grad()
            push(p, 0.0)
            optimizer.step()
        scaler = torch.amp.GradScaler("cpu", init_scale=4)
        before = stage.pushes()
        with stage.stopped_servers(0.2):
            for grad in (float("inf"), stage.mine(2.0, 4.0)):
                optimizer.zero_grad()
                scaler.scale((p * grad).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        equal(p.item(), -2.0)
        equal(stage.pushes() - before, 2, "pushes")
        equal(stage.open_rounds(), 0, "open rounds")
        stage.same(p)


@scenario()
def c62_results_belong_to_the_caller(stage: Stage) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = gradsum.push_pull(torch.full((3000,), 1.0), average=False, name="x")
        kept.add_(1.0)
        for i in range(20):
            gradsum.push_pull(torch.full((3000,), float(i)), average=False, name="x")
        equal(kept, torch.full((3000,), 3.0))
        given = torch.ones(50_000)
        for _ in range(700):  # until the allocator has what it needs
            gradsum.push_pull(given, name="memory")
        gc.collect()
        before = psutil.Process().memory_info().rss
        for _ in range(1000):
            gradsum.push_pull(given, name="memory")
        gc.collect()
        grown = psutil.Process().memory_info().rss - before
        assert grown < 50e6, f"memory grew by {grown / 1e6:.0f} MB in 1000 pulls of 200 KB"
        stage.again()
        equal(kept, torch.full((3000,), 3.0))
        kept.mul_(2.0)


@scenario(ranks=(1, 2), limit=60.0)
def c86_init_and_shutdown_again_and_again(stage: Stage) -> None:
    files = threads = 0
    for cycle in range(100):
        start = time.monotonic()
        given = torch.tensor([float(cycle + stage.rank)])
        total = gradsum.push_pull(given, average=False, name="x")
        equal(total.item(), sum(float(cycle + r) for r in range(stage.size)))
        stage.again()
        seconds = time.monotonic() - start
        assert seconds < 2.0, f"cycle {cycle} took {seconds:.2f} s"
        if cycle == 10:
            gc.collect()
            files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) - files <= 5
    assert threading.active_count() - threads <= 5
    gradsum.shutdown()
    gradsum.shutdown()
    assert not gradsum.is_initialized()
    raises(UsageError, lambda: gradsum.push_pull(torch.ones(1), name="x"), "not initialised")
    raises(UsageError, gradsum.rank, "init()")


@scenario(services=("one server",), limit=40.0)
def c13_thousands_of_results_outstanding(stage: Stage) -> None:
    given = [torch.full((4,), float(i + stage.rank)) for i in range(3000)]
    gradsum.push_pull(given, average=False, name="x")
    with within(20.0, "3000 results"):
        handle = gradsum.push_pull_async(given, average=False, name="x")
        stage.session._comm.post(lambda now: time.sleep(2.0))  # nothing is read meanwhile
        results = gradsum.synchronize(handle)
    wrong = [i for i, r in enumerate(results) if not torch.equal(r, torch.full((4,), 2.0 * i + 1))]
    assert not wrong, f"{len(wrong)} results are wrong, the first is number {wrong[0]}"


@scenario(services=("one server",), limit=60.0)
def c43_thousands_of_small_tensors(stage: Stage) -> None:
    def timed(parameters: list[nn.Parameter]) -> tuple[float, float, int]:
        """Seconds of the first step; processor seconds and messages of a later one."""
        start = time.monotonic()
        optimizer = sgd(*parameters, lr=1.0)
        first, begin, pushes = 0.0, 0.0, 0
        for step in range(7):
            if step == 4:  # packed by now
                gradsum.barrier()
                begin, pushes = time.process_time(), stage.pushes()
            for p in parameters:
                p.grad = torch.full_like(p, float(stage.mine(1, 3)))
            optimizer.step()
            first = first or time.monotonic() - start
        for p in parameters:
            equal(p.detach(), torch.full_like(p, -14.0))
        return first, (time.process_time() - begin) / 3, (stage.pushes() - pushes) // 3

    first, small, messages = timed([nn.Parameter(torch.zeros(256)) for _ in range(2000)])
    timed([nn.Parameter(torch.zeros(512 * 1024))])
    assert first < 15.0, f"first step {first:.2f} s"  # 1 s on two idle cores
    assert small < 2.0, f"{small:.3f} s of processor time per step"  # 0.4 s when idle
    assert messages < 20, f"{messages} messages per step"


def _many_threads(stage: Stage, rounds: int, sizes: tuple[int, ...]) -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        try:
            for i in range(rounds):
                n = sizes[(number + i) % len(sizes)]
                given = torch.full((n,), float(number * 1000 + i + stage.rank))
                total = gradsum.push_pull(given, average=False, name=f"{number}.{n}")
                equal(total, torch.full((n,), 2.0 * (number * 1000 + i) + 1))
        except BaseException as error:
            failures.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    model = seeded(mlp)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), *model.named_parameters())
    with within(15.0, "20 steps"):
        train(model, optimizer, square_loss, stage.rank, range(20))
    for thread in threads:
        thread.join(stage.limit)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)
    stage.same(*model.parameters())


@scenario(services=("unpacked",), limit=30.0)
def c52_push_pull_from_many_threads(stage: Stage) -> None:
    _many_threads(stage, 60, (16, 1000, 65536))


@scenario(services=("plain",), limit=60.0)
def c52_push_pull_from_many_threads_across_a_fence(stage: Stage) -> None:
    _many_threads(stage, 200, (16, 1000, 65536))


@scenario(limit=10.0)
def a_fence_does_not_wait_for_the_window_of_another_optimizer(stage: Stage) -> None:
    """Rank 0 has pushed for a window that rank 1 closes only after the fence."""
    ones, twos = ([parameter(0.0), parameter(0.0)] for _ in range(2))

    def to_next_epoch(optimizer: Any, parameters: list[nn.Parameter]) -> None:
        before = stage.epoch()
        for _ in range(200):
            optimizer.zero_grad()
            for p in parameters:
                push(p, stage.mine(1.0, 3.0))
            optimizer.step()
            if stage.epoch() > before:
                return
        raise AssertionError("no fence in 200 steps")

    one = sgd(*ones, lr=1.0)
    to_next_epoch(one, ones)
    until(lambda: stage.session.firings(one._gradients.group) is not None, "firings")
    one.zero_grad()
    stage.meet()
    two = sgd(*twos, lr=1.0)
    before = ones[0].item()
    if stage.rank == 0:
        push(ones[0], 2.0)
    to_next_epoch(two, twos)
    one.step()
    equal(ones[0].item(), before - 1.0)
    stage.same(*ones, *twos)


@scenario(ranks=(1,), services=("one server",), limit=120.0, long=True)
def c73_two_gibibytes_and_more(stage: Stage) -> None:
    tensor = torch.ones(22 * 2**30 // 40)
    tensor[-1] = 7.0
    total = gradsum.push_pull_inplace(tensor, average=False, name="large")
    equal(total[-3:].tolist(), [1.0, 1.0, 7.0])
    assert bool((total[:-1] == 1.0).all())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak <= 2.5 * tensor.nbytes, f"peak {peak / 1e9:.1f} GB"


@scenario()
def c86_ranks_begin_again_without_waiting_for_each_other(stage: Stage) -> None:
    for cycle in range(20):
        total = gradsum.push_pull(torch.tensor([float(cycle)]), average=False, name="x")
        equal(total.item(), 2.0 * cycle)
        gradsum.shutdown()
        stage.enter()


@scenario(ranks=(1,), services=("alone", "plain"))
def c101_one_worker_with_and_without_a_service(stage: Stage) -> None:
    equal((gradsum.rank(), gradsum.size()), (0, 1))
    model, plain = seeded(mlp), seeded(mlp)
    gradsum.broadcast_parameters(model.state_dict())
    optimizer = wrapped(torch.optim.Adam(model.parameters(), lr=0.1), *model.named_parameters())
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)
    train(model, optimizer, square_loss, 0, range(8))
    for step in range(8):
        reference.zero_grad()
        square_loss(plain, 0, step).backward()
        reference.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        equal(p.detach(), q.detach())
    close(gradsum.push_pull(torch.tensor(3.0), name="loss"), 3.0)
    equal(gradsum.join(), 0)
