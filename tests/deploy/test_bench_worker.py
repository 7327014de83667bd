"""One rank of the benchmark: it sees a wrong element in every form, and counts what a round costs.

The last test plants one wrong element in a real job: that exactly this one is reported shows that
all others of all ranks and rounds are right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradsum.deploy import bench_contenders
from gradsum.deploy.bench_contenders import FORMS, WIRES, Buckets, Contender, Gradients
from gradsum.deploy.bench_payload import Payload
from gradsum.deploy.bench_usage import Usage
from gradsum.deploy.bench_worker import combine, main, measure, parse, results
from gradsum.worker import api
from tests.deploy.processes import Processes

COUNTS = [700, 300]
REQUIRED = ["--bytes", "4096", "--tensors", "2", "--rounds", "3"]


@pytest.fixture
def job_of_one() -> Iterator[None]:
    api.init()
    yield
    api.shutdown()


def spoil(contender: Contender, tensors: Callable[[], Sequence[torch.Tensor]]) -> Contender:
    """Adds one to two elements of the second tensor after each round."""

    def reduce(held: Sequence[torch.Tensor]) -> None:
        contender.reduce(held)
        tensors()[1][7:9] += 1

    return contender._replace(reduce=reduce)


@pytest.mark.usefixtures("job_of_one")
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("form", FORMS)
def test_wrong_rounds_are_counted_per_contender(
    form: str, wire: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = FORMS[form](COUNTS, WIRES[wire])
    contenders = {"good": held.contender, "bad": spoil(held.contender, held.tensors)}
    measured = measure(contenders, held.tensors, Payload(COUNTS, 0, 1, wire), rounds=3)
    assert measured.wrong.tolist() == [0, 6]
    assert (measured.seconds > 0).all()
    assert combine(measured).wrong.tolist() == [0, 6]
    said = capsys.readouterr().err
    assert "bad, round 0: 2 wrong elements on rank 0; the first is element 7 of tensor 1" in said


@pytest.mark.usefixtures("job_of_one")
def test_gradients_that_were_replaced_are_the_ones_filled_and_checked() -> None:
    """As when they move to shared memory: what the parameter no longer holds does not count."""
    form = Gradients(COUNTS, WIRES["fp32"])
    objects: list[torch.Tensor] = []

    def move(held: Sequence[torch.Tensor]) -> None:
        form.contender.reduce(held)
        if not objects:
            for parameter, grad in zip(form._module, held, strict=True):
                parameter.grad = grad.clone()
                grad.zero_()
        objects.extend(form.tensors())

    moving = {"gradsum": form.contender._replace(reduce=move)}
    measured = measure(moving, form.tensors, Payload(COUNTS, 0, 1), rounds=3)
    assert measured.wrong.tolist() == [0]
    assert len({id(each) for each in objects}) == 2


@pytest.mark.usefixtures("job_of_one")
def test_a_round_of_gradients_is_a_window_and_moves_no_weight() -> None:
    form = Gradients(COUNTS, WIRES["bf16"])
    measure({"gradsum": form.contender}, form.tensors, Payload(COUNTS, 0, 1, "bf16"), rounds=4)
    assert form._optimizer.windows == 4
    assert not any(parameter.any() for parameter in form._module)


@pytest.mark.usefixtures("job_of_one")
def test_the_result_has_every_round_and_the_usage_of_each_rank() -> None:
    form = FORMS["tensors"](COUNTS, WIRES["fp32"])
    kept: list[torch.Tensor] = []

    def hungry(held: Sequence[torch.Tensor]) -> None:
        form.contender.reduce(held)
        kept.append(torch.ones(1 << 20))  # memory that was never touched

    contenders = {"gradsum": form.contender, "gloo": Contender(hungry)}
    total = combine(measure(contenders, form.tensors, Payload(COUNTS, 0, 1), 5), warmup=2)
    found = json.loads(json.dumps(results(list(contenders), total)))
    assert list(found) == ["contenders", "links", "usage"]
    for name in contenders:
        assert len(found["contenders"][name]["seconds"]) == 5
        assert found["contenders"][name]["wrong"] == 0
        assert len(found["usage"]["cpu_seconds"][name]) == 1
        assert 0 <= found["usage"]["idle"][name][0] <= 1
    faults = found["usage"]["minor_faults"]
    assert faults["gloo"][0] >= 2 > 0 <= faults["gradsum"][0]
    assert found["usage"]["cpu_seconds"]["gloo"][0] > 0


def test_usage_is_the_difference_of_two_readings() -> None:
    before = Usage(1, 2.0, 3.0, 4.0)
    assert Usage(11, 2.5, 4.0, 6.0).since(before) == (10, 0.5, 1.0, 2.0)
    now = Usage.now()
    assert now.minor_faults > 0 and 0 <= now.idle_seconds <= now.machine_seconds


@pytest.mark.parametrize("limit", [1, 4 * 500, 1 << 30])
def test_buckets_hold_every_tensor_and_sum_it_in_place(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flats: list[int] = []

    def doubled(flat: torch.Tensor, async_op: bool) -> None:
        flats.append(len(flat))
        flat *= 2

    monkeypatch.setattr(dist, "all_reduce", doubled)
    monkeypatch.setattr(bench_contenders, "_BUCKET", limit)
    counts = [300, 400, 200, 350]
    tensors = [torch.arange(count).float() + 1000 * i for i, count in enumerate(counts)]
    expected = [2 * tensor for tensor in tensors]
    Buckets(counts).reduce(tensors)
    assert all(map(torch.equal, tensors, expected))
    assert flats == {1: [350, 200, 400, 300], 2000: [550, 700], 1 << 30: [1250]}[limit]


@pytest.mark.parametrize(
    "words",
    [
        ["--form", "buckets"],
        ["--wire", "int8"],
        ["--warmup", "3"],
        ["--warmup", "-1"],
        ["--bytes", "7"],
        ["--tensors", "0"],
    ],
)
def test_bad_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse([*REQUIRED, *words])
    assert exit_.value.code == 2
    capsys.readouterr()


def test_alone_it_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REQUIRED, "--warmup", "1", "--form", "gradients", "--wire", "fp16"]) == 0
    assert "every element of every round is right" in capsys.readouterr().out
    assert main([*REQUIRED, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["workers"], report["rounds"], report["wire"]) == (1, 3, "fp32")


def test_with_a_result_it_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result"
    assert main([*REQUIRED, "--result", str(file)]) == 0
    assert json.loads(file.read_text())["contenders"]["gradsum"]["wrong"] == 0
    assert capsys.readouterr().out == ""


PLANTED = """
import sys
from gradsum.deploy import bench_contenders as contenders, bench_worker as worker

class Planted(contenders.Gradients):
    rounds = 0
    def __init__(self, counts, compression):
        super().__init__(counts, compression)
        self.contender = self.contender._replace(reduce=self.reduce)
    def reduce(self, tensors):
        self._optimizer.synchronize()
        if worker.api.rank() == 1 and self.rounds == 2:
            self.tensors()[1][7] += 0.5
        self.rounds += 1

worker.FORMS = {"tensors": None, "gradients": Planted}
sys.exit(worker.main())
"""


@pytest.mark.slow
def test_one_wrong_element_of_one_rank_is_the_only_one_in_a_real_job(
    processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    words = "--bytes 4000000 --tensors 3 --rounds 4 --warmup 1 --form gradients --wire bf16 --json"
    launch = "launch --standalone --nproc-per-node 2 --".split()
    code, out, err = processes.end(
        processes.gradsum(*launch, sys.executable, "planted.py", *words.split())
    )
    assert code == 1
    assert "gradsum, round 2: 1 wrong elements on rank 1; the first is element 7 of tensor 1" in err
    report = json.loads(out.removeprefix("[w0] "))
    assert report["wrong_elements"] == {"gradsum": 1}
    assert (report["workers"], report["form"], report["wire"]) == (2, "gradients", "bf16")
