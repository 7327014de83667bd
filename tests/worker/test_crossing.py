"""Steps that are made when their sums arrive: the same numbers as with the barrier, never early."""

from __future__ import annotations

import copy
import io
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from gradsum.errors import UsageError
from gradsum.worker.client import Client
from gradsum.worker.optimizer import Distributed, wrap
from tests.worker.models import assert_close, assert_equal, both, data, net, seeded, single
from tests.worker.naive import NaiveCluster, settled

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
STEPS = 6


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


class Odd(nn.Module):
    """Tied, borrowed, frozen and unused weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied, self.lent = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale, self.unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tied.bias  # before its own module is entered
        x = self.frozen(self.tied(torch.tanh(self.first(x))) * self.scale)
        return F.linear(x, self.lent.weight)


class Recurrent(nn.Module):
    """Weights that are handed to C++ in a list, computed by a parametrization or by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 3, num_layers=2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.spectral = nn.utils.weight_norm(nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.spectral(self.normed(self.cell(x[None])[0]))
        return out


class Recomputed(nn.Module):
    """Activation checkpoints, of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        x = checkpoint(self.second, torch.tanh(x), use_reentrant=False)
        out: Tensor = self.last(x)
        return out


class Counting(torch.optim.Optimizer):
    """As optimizers of others are: the number of steps is the group's, and decides the rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] / group["steps"] * p.grad


Loop = Callable[[Any, nn.Module, int], None]


def train(
    client: Client, cross: bool, make: Callable[[], nn.Module] = layers,
    kind: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.Adam(p, lr=0.01),
    loop: Loop | None = None, **how: Any,
) -> tuple[Distributed, nn.Module]:  # fmt: skip
    model = seeded(make)
    optimizer = wrap(
        client, kind(model.parameters()), model.named_parameters(), model=model,
        cross_barrier=cross, **how,
    )  # fmt: skip
    for step in range(STEPS):
        if loop is not None:
            loop(optimizer, model, step)
            continue
        optimizer.zero_grad()
        model(data(client.session.rank, step)).square().sum().backward()
        optimizer.step()
    return optimizer, model


def results(late: bool, cross: bool, ranks: int = 2, **how: Any) -> list[Tensor]:
    """The final state on all ranks, which must be the same."""

    def work(client: Client) -> list[Tensor]:
        _, model = train(client, cross, **how)
        return [tensor.clone() for tensor in model.state_dict().values()]

    states = NaiveCluster(ranks, late=late).run(work)
    for other in states[1:]:
        assert_equal(states[0], other)
    return states[0]


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "counting": Counting,
}


@both
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [layers, Odd, Recurrent, Recomputed])
def test_equals_the_barrier_bit_for_bit(
    late: bool, kind: str, make: Callable[[], nn.Module]
) -> None:
    how: dict[str, Any] = {"kind": KINDS[kind], "make": make}
    assert_equal(results(late, True, **how), results(late, False, **how))


@both
@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks(late: bool, ranks: int) -> None:
    assert_equal(results(late, True, ranks), results(late, False, ranks))


def clear_in_between(optimizer: Any, model: nn.Module, step: int) -> None:
    loss = model(data(step, step)).square().sum()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    loss.backward()
    optimizer.step()


def clear_by_the_model(optimizer: Any, model: nn.Module, step: int) -> None:
    model.zero_grad()
    model(data(step, step)).square().sum().backward()
    optimizer.step()


def zero_before(optimizer: Any, model: nn.Module, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(data(step, step)).square().sum().backward()
    optimizer.step()


def never_clear(optimizer: Any, model: nn.Module, step: int) -> None:
    model(data(step, step)).square().sum().backward()
    optimizer.step()


def two_forwards(optimizer: Any, model: nn.Module, step: int) -> None:
    optimizer.zero_grad()
    for half in range(2):
        with torch.inference_mode():  # states of the optimizer must not be born in it
            model(data(half, step))
        (model(data(half, step)).square().sum() / 2).backward()
    optimizer.step()


@both
@pytest.mark.parametrize(
    ("loop", "passes"),
    [(clear_in_between, 1), (clear_by_the_model, 1), (zero_before, 1), (never_clear, 1),
     (two_forwards, 2)],
)  # fmt: skip
def test_ways_to_write_a_loop(late: bool, loop: Loop, passes: int) -> None:
    how: dict[str, Any] = {"loop": loop, "backward_passes_per_step": passes}
    assert_equal(results(late, True, **how), results(late, False, **how))


def test_step_does_not_wait_and_the_forward_does() -> None:
    stepped = threading.Event()

    def work(client: Client) -> list[Tensor]:
        model = net()
        optimizer = wrap(
            client, torch.optim.SGD(model.parameters(), lr=0.1), model=model, cross_barrier=True
        )
        first = client.session.rank == 0
        loss = model(data(client.session.rank, 0)).square().sum()
        if not first:
            assert stepped.wait(10), "rank 0 waits in step() for a gradient that comes after it"
        before = [p.detach().clone() for p in model.parameters()]
        loss.backward()
        optimizer.step()
        if first:
            assert not settled(client)
            assert_equal(before, [p.detach() for p in model.parameters()])
            stepped.set()
        optimizer.zero_grad()
        model(data(0, 1))
        return [p.detach().clone() for p in model.parameters()]

    alone = single(2, 1, lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
                   lambda m, x: m(x).square().sum())  # fmt: skip
    for found in NaiveCluster(2).run(work):
        assert_close(found, [p.detach() for p in alone.parameters()])


def test_options_are_those_at_step() -> None:
    def schedule(optimizer: Any, model: nn.Module, step: int) -> None:
        optimizer.zero_grad()
        model(data(step, step)).square().sum().backward()
        optimizer.step()
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(0.1 / (step + 2))
            else:
                group["lr"] = 0.1 / (step + 2)

    def tensor_rate(p: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(p, lr=torch.tensor(0.1))

    for kind in (tensor_rate, lambda p: torch.optim.SGD(p, lr=0.1)):
        how: dict[str, Any] = {"kind": kind, "loop": schedule}
        assert_equal(results(True, True, **how), results(True, False, **how))


def test_c05_a_scheduler_sees_its_step() -> None:
    def work(client: Client) -> list[float]:
        optimizer, model = train(client, True)
        schedule = StepLR(optimizer, 1, gamma=0.5)
        model(data(0, 0)).sum().backward()
        optimizer.step()
        schedule.step()
        return [group["lr"] for group in optimizer.param_groups]

    assert NaiveCluster(2).run(work) == [[0.005], [0.005]]


READS: dict[str, Callable[[Distributed, nn.Module], Any]] = {
    "flush": lambda optimizer, model: optimizer.flush(),
    "state_dict": lambda optimizer, model: model.state_dict(),
    "state_dict of a part": lambda optimizer, model: [m.state_dict() for m in model.children()],
    "the optimizer's state_dict": lambda optimizer, model: optimizer.state_dict(),
    "a copy of the optimizer": lambda optimizer, model: copy.deepcopy(optimizer),
    "evaluation": lambda optimizer, model: model.eval()(data(0, 0)),
    "training": lambda optimizer, model: model(data(0, 0)),
    "synchronize": lambda optimizer, model: optimizer.synchronize(),
}


@pytest.mark.parametrize("read", READS)
def test_what_waits_by_itself(read: str) -> None:
    def work(client: Client) -> list[Tensor]:
        optimizer, model = train(client, True)
        before = [p.detach().clone() for p in model.parameters()]
        READS[read](optimizer, model)
        after = [p.detach().clone() for p in model.parameters()]
        assert not any(torch.equal(b, a) for b, a in zip(before, after, strict=True))
        return after

    expected = results(True, False)
    for after in NaiveCluster(2, late=True).run(work):
        assert_equal(after, expected)


@pytest.mark.parametrize("early", [False, True])
def test_a_stale_weight_is_an_error_not_a_number(early: bool) -> None:
    def work(client: Client) -> None:
        optimizer, model = train(client, True)
        optimizer.zero_grad()
        weight: Any = model.get_parameter("0.weight")
        if not early:
            optimizer.flush()
        loss = F.linear(data(0, 0), weight).sum()
        if early:
            with pytest.raises(UsageError, match=r"'opt0/0\.weight' was used before"):
                loss.backward()
        else:
            loss.backward()

    NaiveCluster(2, late=True).run(work)


def test_a_gradient_that_is_changed_on_its_way() -> None:
    def work(client: Client) -> None:
        optimizer, model = train(client, True)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(2)
        with pytest.raises(UsageError, match="was changed while its sum was on the way"):
            model(data(0, 0))

    NaiveCluster(2, late=True).run(work)


def clip(optimizer: Any, model: nn.Module, step: int) -> None:
    optimizer.zero_grad()
    model(data(step, step)).square().sum().backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()


def scale(optimizer: Any, model: nn.Module, step: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(model(data(step, step)).square().sum()).backward()
    if step == 2:
        for p in model.parameters():
            assert p.grad is not None
    scaler.step(optimizer)
    scaler.update()


def closure(optimizer: Any, model: nn.Module, step: int) -> None:
    def call() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(data(step, step)).square().sum()
        loss.backward()
        return loss

    optimizer.step(call)


@both
@pytest.mark.parametrize("loop", [clip, scale, closure])
def test_what_needs_the_whole_gradient_uses_the_barrier_and_says_so_once(
    late: bool, loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    how: dict[str, Any] = {"loop": loop, "ranks": 1}
    with caplog.at_level(logging.WARNING, "gradsum.worker"):
        crossed = results(late, True, **how)
    assert_equal(crossed, results(late, False, **how))
    said = [r.message for r in caplog.records if "steps wait for all sums" in r.message]
    assert len(said) == 1


def test_hooks_of_the_optimizers_step_run_once_a_step() -> None:
    def work(client: Client) -> int:
        calls: list[int] = []

        def loop(optimizer: Any, model: nn.Module, step: int) -> None:
            if step == 0:
                optimizer.register_step_post_hook(lambda *_: calls.append(1))
            zero_before(optimizer, model, step)

        train(client, True, loop=loop)
        return len(calls)

    assert NaiveCluster(2).run(work) == [STEPS, STEPS]


def test_autocast_does_not_reach_the_step() -> None:
    class Product(torch.optim.Optimizer):
        """A step with a matrix product, which autocast would round."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.dim() == 2:
                    p -= 0.01 * p.grad @ p.grad.T @ p

    def loop(optimizer: Any, model: nn.Module, step: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(data(step, step)).float().square().sum()
        loss.backward()
        optimizer.step()

    how: dict[str, Any] = {"kind": Product, "loop": loop}
    assert_equal(results(True, True, **how), results(True, False, **how))


def test_copies_and_pickles_of_the_model_are_free_of_it() -> None:
    def work(client: Client) -> None:
        optimizer, model = train(client, True)
        optimizer.flush()
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        for other in (twin, again):
            assert torch.equal(other(data(0, 0)), model(data(0, 0)))
            assert_equal(list(other.state_dict().values()), list(model.state_dict().values()))

    NaiveCluster(2).run(work)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in place", "compiled first", "compiled after"])
def test_compiled_models(how: str) -> None:
    torch.compiler.reset()

    def work(client: Client) -> list[Tensor]:
        model: Any = net()
        if how == "in place":
            model.compile(backend="eager")
        run: Any = torch.compile(model, backend="eager") if how == "compiled first" else model
        optimizer = wrap(
            client, torch.optim.Adam(model.parameters(), lr=0.01), model=run, cross_barrier=True
        )
        if how == "compiled after":
            run = torch.compile(model, backend="eager")
        for step in range(STEPS):
            optimizer.zero_grad()
            run(data(client.session.rank, step)).square().sum().backward()
            optimizer.step()
        return [tensor.clone() for tensor in model.state_dict().values()]

    assert_equal(NaiveCluster(1, late=True).run(work)[0], results(True, False, 1))


def test_a_model_is_needed() -> None:
    def work(client: Client) -> None:
        inner = torch.optim.SGD(net().parameters(), lr=0.1)
        with pytest.raises(UsageError, match="cross_barrier=True needs the model"):
            wrap(client, inner, cross_barrier=True)

    NaiveCluster(1).run(work)
