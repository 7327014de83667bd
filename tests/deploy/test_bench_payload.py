"""The benchmark's numbers: sums are exact on every wire, and one wrong element is seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsum.deploy.bench_numbers import MAX_RANKS, STEP, Numbers
from gradsum.deploy.bench_payload import Payload, shapes

WIRES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
COUNTS = [5500, 5462, 5422]
every_wire = pytest.mark.parametrize("wire", WIRES)


def filled(rank: int, size: int, round_number: int, wire: str = "fp32") -> list[torch.Tensor]:
    tensors = [torch.empty(count) for count in COUNTS]
    Payload(COUNTS, rank, size, wire).fill(tensors, round_number)
    return tensors


def summed(size: int, round_number: int, wire: str = "fp32") -> list[torch.Tensor]:
    """The right sums, added in rank order by the wire's own type: each step must be exact."""
    dtype = WIRES[wire]
    total = [tensor.to(dtype) for tensor in filled(0, size, round_number, wire)]
    for rank in range(1, size):
        for sum_, tensor in zip(total, filled(rank, size, round_number, wire), strict=True):
            sum_ += tensor.to(dtype)
    return [tensor.float() for tensor in total]


@given(st.integers(0, 10**7), st.integers(1, 200))
def test_tensors_are_equal_to_one_element_and_make_up_the_bytes(
    elements: int, tensors: int
) -> None:
    counts = shapes(4 * elements, tensors)
    assert len(counts) == tensors
    assert sum(counts) == elements
    assert max(counts) - min(counts) <= 1


@every_wire
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("round_number", [0, 1, 507, 508, 100_000])
def test_a_right_sum_has_no_wrong_element(wire: str, size: int, round_number: int) -> None:
    payload = Payload(COUNTS, 0, size, wire)
    assert payload.check(summed(size, round_number, wire), round_number).elements == 0


@every_wire
@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_right_mean_is_the_exact_sum_divided_once(wire: str, size: int) -> None:
    payload = Payload(COUNTS, 0, size, wire)
    sums = summed(size, 6, wire)
    means = [torch.from_numpy(tensor.numpy() / size) for tensor in sums]  # as a sink divides
    assert payload.check(means, 6, divisor=size).elements == 0
    assert payload.check(sums, 6, divisor=size).elements > 0.9 * sum(COUNTS)
    means[2][3000] = torch.nextafter(means[2][3000], torch.tensor(torch.inf))
    assert payload.check(means, 6, divisor=size)[:3] == (1, 2, 3000)


@pytest.mark.parametrize(("wire", "limit"), [("fp32", 2**24), ("fp16", 2048), ("bf16", 256)])
def test_every_size_of_job_is_exact_and_the_next_is_refused(wire: str, limit: int) -> None:
    for size in range(1, MAX_RANKS[wire] + 1):
        numbers = Numbers.of(wire, size)
        assert size * (numbers.bases - 1 + numbers.stamps - 1) <= limit
        assert numbers.stamps > size
        assert STEP % numbers.bases
    with pytest.raises(ValueError, match=f"{MAX_RANKS[wire] + 1} ranks"):
        Numbers.of(wire, MAX_RANKS[wire] + 1)


@every_wire
def test_the_largest_job_is_exact_in_its_type(wire: str) -> None:
    size = MAX_RANKS[wire]
    total = torch.zeros(COUNTS[0], dtype=torch.float64)
    for rank in range(size):
        total += filled(rank, size, 5, wire)[0]
    assert torch.equal(total, total.to(WIRES[wire]).double())
    assert Payload(COUNTS[:1], 0, size, wire).check([total.float()], 5).elements == 0


@given(st.sampled_from(sorted(WIRES)), st.data())
def test_one_wrong_element_is_found_and_named(wire: str, data: st.DataObject) -> None:
    tensors = summed(2, 4, wire)
    tensor = data.draw(st.integers(0, 2))
    place = data.draw(st.integers(0, len(tensors[tensor]) - 1))
    right = tensors[tensor][place].item()
    got = data.draw(st.sampled_from([right + 1, right - 1, 0.0, float("inf"), float("nan")]))
    if got == right:
        return
    tensors[tensor][place] = got
    wrong = Payload(COUNTS, 0, 2, wire).check(tensors, 4)
    assert wrong[:3] == (1, tensor, place)
    assert wrong.expected == right


@every_wire
def test_what_a_broken_service_would_return_is_wrong_nearly_everywhere(wire: str) -> None:
    """Each of these is a bug that the benchmark is there to see."""

    def pushed(rank: int, round_number: int, tensor: int) -> torch.Tensor:
        return filled(rank, 3, round_number, wire)[tensor][:5400]

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
    payload = Payload([5400, 5400], 0, 3, wire)
    assert payload.check([right, others], 9).elements == 0
    for bug, result in bugs.items():
        assert payload.check([result, others], 9).elements > 4800, bug


@given(st.integers(0, 10**6), st.integers(0, 10**4))
def test_ranks_have_different_stamps_in_a_round(round_number: int, tensor: int) -> None:
    for wire, size in MAX_RANKS.items():
        numbers = Numbers.of(wire, size)
        assert len({numbers.stamp(rank, round_number, tensor) for rank in range(size)}) == size


@given(st.sampled_from(sorted(WIRES)), st.integers(0, 10**6), st.data())
def test_a_rank_has_different_stamps_in_rounds_that_are_near(
    wire: str, first: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, MAX_RANKS[wire]))
    numbers = Numbers.of(wire, size)
    rank = data.draw(st.integers(0, size - 1))
    later = first + data.draw(st.integers(1, numbers.stamps - 2))
    assert numbers.stamp(rank, first, 0) != numbers.stamp(rank, later, 0)
