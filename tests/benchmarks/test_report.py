"""Figures from measurements with known numbers; the table of cases."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.__main__ import chosen, parse
from benchmarks.cases import CASES, Case
from benchmarks.report import SHOWN, figures, line, merge, reached

MB = 1_000_000


def case(**more: Any) -> Case:
    fields: dict[str, Any] = {"workers": 4, "servers": 4, "nbytes": 32 * MB} | more
    return Case("case", fields.pop("place", "links"), **fields)


def measured(ours: float, gloo: float = 2.0, wrong: int = 0) -> dict[str, Any]:
    return {
        "contenders": {
            "gradsum": {"seconds": [9.0, ours, ours * 2, ours], "wrong": wrong},
            "gloo": {"seconds": [9.0, gloo, gloo, gloo], "wrong": 0},
        },
        "links": {"0": "tcp"}, "usage": {}, "servers": {}, "idle": 0.5, "interfaces": {},
        "link": {"before": 24e6, "after": 26e6},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("n", "k", "factor"),
    [(4, 4, 1.0), (4, 0, 1.5), (4, 1, 4 / 3), (4, 2, 1.2), (2, 2, 1.0), (8, 8, 1.0), (1, 1, 1.0)],
)
def test_the_best_time_is_the_papers(n: int, k: int, factor: float) -> None:
    assert case(workers=n, servers=k).best == pytest.approx(32 * MB * factor)
    assert case(workers=n, servers=k, wire="bf16").best == pytest.approx(16 * MB * factor)


def test_medians_shares_and_ratios() -> None:
    found = figures(case(owed={"share": 0.9, "ratio": 1.4}), measured(1.35), warmup=1)
    assert found["median_seconds"] == {"gradsum": 1.35, "gloo": 2.0}
    assert found["ratio"] == pytest.approx(2 / 1.35)
    assert found["share"] == pytest.approx(32 / 25 / 1.35)
    assert reached(found) and "NOT REACHED" not in line(found)


def test_what_is_owed_and_wrong_elements_are_said() -> None:
    found = figures(case(owed={"ratio": 1.5}), measured(1.35), warmup=1)
    assert not reached(found) and "NOT REACHED" in line(found)
    found = figures(case(), measured(1.35, wrong=3), warmup=1)
    assert not reached(found) and "3 WRONG ELEMENTS" in line(found)


def placed(change: float = 1.0) -> dict[str, Any]:
    """Interfaces of four workers and two CPU servers by the formula, one of them off."""
    whole = 4 * 32 * MB * 1.046
    nodes = {f"w{i}": (1 + 2 * 2 / 20) * whole for i in range(4)}
    nodes |= {"c0": 4 * 6 / 20 * whole, "c1": 4 * 6 / 20 * whole * change}
    return measured(1.35) | {
        "overhead": 1.046,
        "interfaces": {n: {"received": int(b), "sent": int(b)} for n, b in nodes.items()},
    }


def test_bytes_at_the_interfaces_are_compared_with_the_formula() -> None:
    two = case(servers=2, gloo=False, owed={"placement": 0.99})
    right, wrong = (figures(two, placed(change), warmup=1) for change in (1.0, 1.02))
    assert right["placement"] == pytest.approx(1.0, abs=1e-6) and reached(right)
    assert wrong["placement"] == pytest.approx(0.98, abs=1e-4) and not reached(wrong)


def test_the_delay_of_urgent_sums_is_to_be_small() -> None:
    urgent = case(program="urgent", owed={"urgent_p99": 0.025})
    delays = [9.0] + [0.01] * 98 + [0.02, 0.03]
    found = measured(0.0) | {"backlog": 20e6, "contenders": {
        "gradsum": {"seconds": delays, "wrong": 0}}}  # fmt: skip
    assert figures(urgent, found, warmup=1)["urgent_p99"] == 0.03
    assert not reached(figures(urgent, found, warmup=1))
    found["contenders"]["gradsum"]["seconds"] = delays[:-1]
    assert reached(figures(urgent, found, warmup=1))
    assert "share" in figures(urgent, found, warmup=1)


def test_what_a_real_model_gained_is_compared_with_the_simulator() -> None:
    layers = [{"name": str(i), "tensors": [2_000_000], "forward": 0.05, "backward": 0.1}
              for i in range(4)]  # fmt: skip
    found = measured(0.0) | {"profile": layers, "contenders": {
        "barrier": {"seconds": [9.0, 1.2, 1.2], "wrong": 0},
        "gradsum": {"seconds": [9.0, 1.0, 1.0], "wrong": 0},
    }}  # fmt: skip
    result = figures(case(program="transformer", nbytes=0), found, warmup=1)
    assert result["gain"] == pytest.approx(1.2) and result["nbytes"] == 32_000_000
    assert 1.1 < result["predicted_gain"] < 1.5
    ratio = result["gain"] / result["predicted_gain"]
    assert result["as_predicted"] == pytest.approx(1 - abs(ratio - 1))


def test_a_name_is_one_case_and_a_beginning_is_many() -> None:
    def names(*words: str) -> list[str]:
        return [each.name for each in chosen(parse(["run", *words]))]

    assert names("train-vgg16-1") == ["train-vgg16-1"]
    assert {"train-vgg16-1", "train-vgg16-1-fifo", "train-vgg16-0.1"} <= set(names("train-vgg16-"))


def test_several_runs_give_the_median_of_each_figure() -> None:
    runs = [figures(case(), measured(seconds), warmup=1) for seconds in (1.2, 2.0, 1.6)]
    merged = merge(runs)
    assert merged["median_seconds"]["gradsum"] == 1.6
    assert merged["ratio"] == pytest.approx(2 / 1.6)
    assert merged["ratio_runs"] == [1.0, 1.25, 1.667]


def test_cases_are_whole_and_chosen_by_name_and_setting() -> None:
    for name, each in CASES.items():
        assert each.name == name and each.place in ("shm", "loopback", "links")
        assert (each.rate > 0) == (each.place == "links") and each.best > 0
        assert each.owed.keys() <= set(SHOWN)
    args = parse(["run", "links-n4-k4-200", "--set", "slice_bytes=1K,2K"])
    found = [(each.name, dict(each.settings)) for each in chosen(args)]
    assert found == [
        (f"links-n4-k4-200-{way}", {"SLICE_BYTES": size})
        for way in ("reno", "bbr") for size in ("1K", "2K")
    ]  # fmt: skip
