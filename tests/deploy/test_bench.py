"""The benchmark: it must see one wrong element, count time rightly, and run for real."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsum.deploy import bench
from gradsum.deploy.bench_payload import MAX_RANKS, Payload, shapes, stamp
from gradsum.deploy.bench_worker import combine, measure
from gradsum.worker import api

KIB = 1024


def summed(size: int, round_number: int, total_bytes: int = 64 * KIB, tensors: int = 3) -> Payload:
    """Rank 0's payload after a right sum over ``size`` ranks, added in rank order."""
    ranks = [Payload(total_bytes, tensors, rank, size) for rank in range(size)]
    for payload in ranks:
        payload.fill(round_number)
    for payload in ranks[1:]:
        for total, tensor in zip(ranks[0].tensors, payload.tensors, strict=True):
            total += tensor
    return ranks[0]


@given(st.integers(0, 10**7), st.integers(1, 200))
def test_tensors_are_equal_to_one_element_and_make_up_the_bytes(
    elements: int, tensors: int
) -> None:
    counts = shapes(4 * elements, tensors)
    assert len(counts) == tensors
    assert sum(counts) == elements
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("round_number", [0, 1, 507, 508, 100_000])
def test_a_right_sum_has_no_wrong_element(size: int, round_number: int) -> None:
    assert summed(size, round_number).check(round_number).elements == 0


def test_the_largest_job_is_exact_in_float32() -> None:
    payload = Payload(4 * 70_000, 1, rank=0, size=MAX_RANKS)
    total = torch.zeros(70_000, dtype=torch.float64)
    for rank in range(MAX_RANKS):
        each = Payload(4 * 70_000, 1, rank, MAX_RANKS)
        each.fill(5)
        total += each.tensors[0]
    assert total.max() < 2**24
    payload.tensors[0].copy_(total)
    assert payload.check(5).elements == 0
    with pytest.raises(ValueError, match="251 ranks"):
        Payload(4, 1, rank=0, size=MAX_RANKS + 1)


@given(st.data())
def test_one_wrong_element_is_found_and_named(data: st.DataObject) -> None:
    payload = summed(size=2, round_number=4)
    tensor = data.draw(st.integers(0, 2))
    place = data.draw(st.integers(0, len(payload.tensors[tensor]) - 1))
    right = payload.tensors[tensor][place].item()
    got = data.draw(st.sampled_from([right + 1, right - 1, 0.0, float("inf"), float("nan")]))
    if got == right:
        return
    payload.tensors[tensor][place] = got
    wrong = payload.check(4)
    assert wrong[:3] == (1, tensor, place)
    assert wrong.expected == right


def test_what_a_broken_service_would_return_is_wrong_in_every_element() -> None:
    """Each of these is a bug that the benchmark is there to see."""
    ranks = [Payload(4 * 6000, 2, rank, 3) for rank in range(3)]

    def pushed(rank: int, round_number: int, tensor: int) -> torch.Tensor:
        ranks[rank].fill(round_number)
        return ranks[rank].tensors[tensor].clone()

    def summed_up(round_number: int, tensor: int) -> torch.Tensor:
        return torch.stack([pushed(rank, round_number, tensor) for rank in range(3)]).sum(0)

    right, others = summed_up(9, 0), summed_up(9, 1)
    bugs = {
        "not summed": pushed(0, 9, 0),
        "one left out": right - pushed(2, 9, 0),
        "one twice": right + pushed(1, 9, 0),
        "one twice and one left out": right + pushed(1, 9, 0) - pushed(2, 9, 0),
        "the round before": summed_up(8, 0),
        "one of the round before": right - pushed(1, 9, 0) + pushed(1, 8, 0),
        "another tensor": others,
        "one of another tensor": right - pushed(1, 9, 0) + pushed(1, 9, 1),
        "average": right / 3,
        "shifted by one": right.roll(1),
        "a slice at the wrong place": right.roll(1024),
    }
    checked = Payload(4 * 6000, 2, rank=0, size=3)
    for bug, result in bugs.items():
        checked.tensors[0].copy_(result)
        checked.tensors[1].copy_(others)
        assert checked.check(9).elements > 2900, bug


@given(st.integers(0, 10**6), st.integers(0, 10**4))
def test_ranks_have_different_stamps_in_a_round(round_number: int, tensor: int) -> None:
    assert len({stamp(rank, round_number, tensor) for rank in range(MAX_RANKS)}) == MAX_RANKS


@given(st.integers(0, MAX_RANKS - 1), st.integers(0, 10**6), st.integers(1, 507))
def test_a_rank_has_different_stamps_in_508_rounds(rank: int, first: int, later: int) -> None:
    assert stamp(rank, first, 0) != stamp(rank, first + later, 0)


def test_figures_are_median_nearest_rank_p99_and_decimal_gigabytes() -> None:
    found = bench.figures([float(i) for i in range(200, 0, -1)], total_bytes=201 * 10**9)
    assert found[:3] == (100.5, 198.0, 2.0)
    assert found.rounds[:2] == (200.0, 199.0)
    assert bench.figures([0.5], 10**9)[:3] == (0.5, 0.5, 2.0)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(["push-pull", *words])


@pytest.mark.parametrize(
    "words",
    [
        ["--workers", "0"],
        ["--workers", "251"],
        ["--servers", "-1"],
        ["--mb", "0"],
        ["--mb", "nan"],
        ["--mb", "much"],
        ["--tensors", "1.5"],
        ["--rounds", "0"],
        ["--against", "mpi"],
    ],
)
def test_bad_arguments_are_refused_with_what_is_allowed(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        arguments(*words)
    assert exit_.value.code == 2
    assert words[0] in capsys.readouterr().err


@pytest.fixture
def job_of_one() -> Iterator[None]:
    api.init()
    yield
    api.shutdown()


@pytest.mark.usefixtures("job_of_one")
def test_wrong_rounds_are_counted_per_contender(capsys: pytest.CaptureFixture[str]) -> None:
    def good(tensors: object) -> None:
        pass

    def bad(tensors: list[torch.Tensor]) -> None:
        tensors[1][7:9] += 1

    measured = measure({"good": good, "bad": bad}, Payload(4 * KIB, 2, 0, 1), rounds=3)  # type: ignore[dict-item]
    assert measured.wrong.tolist() == [0, 6]
    assert (measured.seconds > 0).all()
    assert combine(measured).wrong.tolist() == [0, 6]
    assert "bad, round 0: 2 wrong elements on rank 0" in capsys.readouterr().err


def stub(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Have ``bench.run`` start a program of one line in the launcher's place."""

    def command(args: argparse.Namespace, total_bytes: int, result: Path) -> list[str]:
        return [sys.executable, "-c", program, str(result)]

    monkeypatch.setattr(bench, "command", command)


WRITE = "import sys, json; json.dump({}, open(sys.argv[1], 'w'))"


def test_a_wrong_element_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lanes = {
        name: {"seconds": [9.0, 2.0], "wrong": n} for n, name in enumerate(["gradsum", "gloo"])
    }
    stub(monkeypatch, WRITE.format(lanes))
    assert bench.run(arguments("--rounds", "1", "--warmup", "1", "--mb", "1000", "--json")) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["wrong_elements"] == {"gradsum": 0, "gloo": 1}
    assert report["gradsum"]["goodput_gb_per_second"] == 0.5
    assert report["rate_against_gloo"] == 1.0
    assert "1 wrong elements" in err


def test_a_failed_run_shows_its_output_and_keeps_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(monkeypatch, "import sys; print('rank 1 fell over'); sys.exit(4)")
    assert bench.run(arguments()) == 4
    assert "rank 1 fell over" in capsys.readouterr().err


def test_a_run_without_result_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, "pass")
    assert bench.run(arguments()) == 1


def test_a_run_that_does_not_end_is_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(monkeypatch, "import signal; signal.pause()")
    assert bench.run(arguments("--timeout", "1")) == 1
    assert "not finished after 1 seconds" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_processes_for_real_against_gloo() -> None:
    words = "bench push-pull --workers 2 --servers 2 --mb 4 --tensors 5 --rounds 4 --warmup 1"
    done = subprocess.run(
        [sys.executable, "-m", "gradsum", *words.split(), "--against", "gloo", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong_elements"] == {"gradsum": 0, "gloo": 0}
    assert report["bytes"] == 4_000_000
    for name in ("gradsum", "gloo"):
        rounds = report[name]["round_seconds"]
        assert len(rounds) == 4
        assert min(rounds) <= report[name]["median_seconds"] <= max(rounds)
    assert report["rate_against_gloo"] > 0
