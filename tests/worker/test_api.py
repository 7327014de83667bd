"""The public face in one process: a local job, errors before and after, and how it ends."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import gradsum
from gradsum.config import load
from gradsum.errors import ConfigError, UsageError
from gradsum.worker import api
from gradsum.worker.default import default


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test begins and ends outside any job, and no gradsum.toml is near."""
    monkeypatch.chdir(tmp_path)
    gradsum.shutdown()
    yield
    gradsum.shutdown()


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": path, **env}, check=False,
    )  # fmt: skip


def test_importing_loads_neither_torch_nor_zmq() -> None:
    done = python("""
        import sys, gradsum
        assert gradsum.__version__
        gradsum.Policy, gradsum.GradsumError
        print([m for m in ("torch", "zmq", "numpy") if m in sys.modules])
    """)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_public_name_is_there_and_documented() -> None:
    names = [name for name in dir(gradsum) if not name.startswith("_")]
    assert {"init", "push_pull", "DistributedOptimizer", "Compression", "join"} <= set(names)
    assert {"DistributedDataParallel", "CrossBarrier"} <= set(names)
    for name in gradsum._API:
        assert inspect.getdoc(getattr(gradsum, name)), name
    for name in gradsum._LATER:
        with pytest.raises(AttributeError, match=f"gradsum.{name} is not built yet"):
            getattr(gradsum, name)
    with pytest.raises(AttributeError, match="no attribute 'push_pul'"):
        gradsum.push_pul  # noqa: B018


def test_the_names_for_type_checkers_are_those_of_the_table() -> None:
    tree = ast.parse(inspect.getsource(gradsum))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    told = {alias.asname: node.module for node in imports for alias in node.names}
    assert told == gradsum._HOMES


def test_arguments_keep_their_order() -> None:
    signature = "tensor average name version priority compression".split()  # BytePS's
    for call in (api.push_pull_inplace, api.push_pull_async, api.push_pull_async_inplace):
        assert list(inspect.signature(call).parameters) == signature
    assert list(inspect.signature(api.DistributedOptimizer).parameters) == [
        "optimizer", "named_parameters", "compression", "backward_passes_per_step",
        "model", "cross_barrier",
    ]  # fmt: skip
    assert list(inspect.signature(api.broadcast_parameters).parameters) == [
        "params", "root_rank", "prefix",
    ]  # fmt: skip


def test_before_init_and_after_shutdown() -> None:
    assert not gradsum.is_initialized()
    for _ in range(2):
        for call in (
            gradsum.rank,
            gradsum.barrier,
            gradsum.flush,
            lambda: gradsum.push_pull(torch.zeros(1), name="x"),
            lambda: gradsum.DistributedOptimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1)),
        ):
            with pytest.raises(UsageError, match=r"not initialised: call gradsum\.init\(\)"):
                call()
        gradsum.init()
        assert gradsum.is_initialized()
        gradsum.shutdown()
        gradsum.shutdown()


def test_c101_a_laptop_run_equals_plain_torch() -> None:
    gradsum.init()
    assert (gradsum.rank(), gradsum.size(), gradsum.local_rank(), gradsum.local_size()) == (
        0,
        1,
        0,
        1,
    )

    def train(distributed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if distributed:
            gradsum.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = gradsum.DistributedOptimizer(
                optimizer, model.named_parameters(), model=model
            )
            gradsum.broadcast_optimizer_state(optimizer)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
        if distributed:
            gradsum.assert_in_sync(model)
            assert gradsum.join() == 0
        return [p.detach() for p in model.parameters()]

    for ours, plain in zip(train(True), train(False), strict=True):
        assert torch.equal(ours, plain)


def test_push_pull_in_all_its_forms() -> None:
    gradsum.init()
    given = torch.tensor([1.0, 2.0])
    assert gradsum.push_pull(given, name="a").tolist() == [1, 2]
    assert gradsum.push_pull_inplace(given, name="b") is given
    handle = gradsum.push_pull_async(given, average=False, name="c")
    assert gradsum.poll(handle)
    with pytest.raises(TypeError, match="Tensor is no handle"):
        gradsum.synchronize(given)
    assert gradsum.synchronize(handle) is gradsum.synchronize(handle)
    assert gradsum.synchronize(gradsum.push_pull_async_inplace([given], name="d"))[0] is given
    assert [t.tolist() for t in gradsum.push_pull([given, given + 1], name="e")] == [[1, 2], [2, 3]]
    assert gradsum.push_pull(given, True, "f", 0, 3, gradsum.Compression.bf16).tolist() == [1, 2]
    gradsum.declare("g", gradsum.Policy())
    gradsum.mark_step()
    gradsum.barrier()
    gradsum.flush()
    assert gradsum.broadcast_object({"a": (1,)}) == {"a": (1,)}
    moment, rate = gradsum.get_pushpull_speed()
    assert moment > 1e12 and rate > 0


def test_init_again() -> None:
    gradsum.init()
    client = default.client
    gradsum.init()
    assert default.client is client
    with pytest.raises(UsageError, match=r"(?s)other settings.*shutdown\(\)"):
        gradsum.init(nan_guard=True)
    gradsum.shutdown()
    gradsum.init(nan_guard=True)
    assert default.client is not client


def test_c86_cycles() -> None:
    for i in range(100):
        gradsum.init()
        assert gradsum.push_pull(torch.tensor(float(i)), name="x").item() == i
        gradsum.shutdown()


def test_c101_missing_variables_are_listed_together() -> None:
    with pytest.raises(ConfigError, match=r"(?s)coordinator, rank.*GRADSUM_COORDINATOR.*RANK"):
        gradsum.init(world_size=2)
    with pytest.raises(UsageError, match="not both"):
        gradsum.init(load({}, {}), rank=0)
    assert not gradsum.is_initialized()


def test_use_in_a_forked_child_is_refused() -> None:
    done = python("""
        import os, torch, gradsum
        gradsum.init()
        child = os.fork()
        if child == 0:
            try:
                gradsum.push_pull(torch.zeros(1), name="x")
            except gradsum.GradsumError as error:
                print("refused:", error.message, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    """)
    assert "refused: this process was forked" in done.stdout, done.stderr


SPY = """
    import gradsum
    gradsum.init()
    from gradsum.worker.default import default
    session = default.client.session
    session.abort = lambda message: print("abort:", message, flush=True)
    session.close = lambda: print("close", flush=True)
"""


def test_a_script_that_raises_is_no_clean_leave() -> None:
    done = python(SPY + "\n    raise RuntimeError('bad batch')")
    assert done.returncode == 1 and "bad batch" in done.stderr
    assert done.stdout.startswith("abort: RuntimeError: bad batch")


def test_a_script_that_ends_leaves_politely() -> None:
    done = python(SPY)
    assert (done.returncode, done.stdout) == (0, "close\n"), done.stderr
