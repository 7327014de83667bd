"""What the benchmark's figures are, as JSON and for people."""

from __future__ import annotations

from typing import Any

import pytest

from gradsum.deploy.bench_report import Job, duration, figures, link_bytes, rate, report, table

JOB = Job(4, 2, 10**9, 16, "tensors", "fp32", "auto", warmup=1, rounds=2)
PROBE = {"stream_gb_per_second": 2.0, "copy_gb_per_second": 8.0, "add_gb_per_second": 6.0}


def measured(*links: str, **seconds: list[float]) -> dict[str, Any]:
    """What a rank program writes."""
    return {
        "contenders": {name: {"seconds": each, "wrong": 0} for name, each in seconds.items()},
        "links": {str(server): how for server, how in enumerate(links)},
        "usage": {
            "minor_faults": dict.fromkeys(seconds, [3.0, 17.0, 4.0, 5.0]),
            "cpu_seconds": dict.fromkeys(seconds, [0.5, 0.25, 0.5, 0.75]),
            "idle": dict.fromkeys(seconds, [0.42, 0.4, 0.4, 0.4]),
        },
    }


def test_figures_are_median_nearest_ranks_and_decimal_gigabytes() -> None:
    found = figures([float(i) for i in range(200, 0, -1)], total_bytes=201 * 10**9)
    assert found[:4] == (100.5, 100.0, 198.0, 2.0)
    assert found.rounds[:2] == (200.0, 199.0)
    assert figures([0.5], 10**9)[:4] == (0.5, 0.5, 0.5, 2.0)


@pytest.mark.parametrize(
    ("links", "share"), [(("tcp", "tcp"), 0.5), (("shm", "tcp"), 0.5), (("shm", "shm"), 0.125)]
)
def test_share_of_the_link_is_by_the_stream_unless_all_links_are_memory(
    links: tuple[str, str], share: float
) -> None:
    found = report(JOB, measured(*links, gradsum=[9.0, 1.0, 1.0], gloo=[9.0, 2.0, 2.0]), PROBE)
    assert found["gradsum"]["link_share"] == share
    assert found["gloo"]["link_share"] == 1.5 / 2 / 2
    assert found["probe"] == PROBE
    assert found["links"] == {"0": links[0], "1": links[1]}


def test_a_half_type_halves_what_gradsum_carries_and_a_ring_carries_its_own() -> None:
    assert link_bytes("gradsum", JOB) == 10**9
    assert link_bytes("gradsum", JOB._replace(wire="bf16")) == 5 * 10**8
    assert link_bytes("gloo", JOB._replace(wire="bf16")) == 1.5 * 10**9
    assert link_bytes("ddp", JOB._replace(workers=2)) == 10**9
    assert link_bytes("ddp", JOB._replace(workers=1)) == 0


def test_rates_against_the_others_leave_the_warm_up_out() -> None:
    found = report(JOB, measured("shm", gradsum=[9.0, 2, 2], gloo=[1.0, 3, 3], ddp=[1.0, 8, 8]))
    assert (found["rate_against_gloo"], found["rate_against_ddp"]) == (1.5, 4.0)
    assert found["gradsum"]["round_seconds"] == (2, 2)
    assert found["gradsum"]["minor_faults"] == [3, 17, 4, 5]
    assert "probe" not in found and "link_share" not in found["gradsum"]


def test_the_table_has_a_row_a_contender_and_units_for_every_size() -> None:
    job = JOB._replace(total_bytes=4096, tensors=1, servers=0)
    found = report(job, measured("shm", "shm", gradsum=[9.0, 4.1e-4, 4.1e-4], gloo=[9.0, 1.5, 2.5]))
    lines = table(found).splitlines()
    assert lines[0] == "push-pull: 4 workers, 2 servers, 4096 bytes of float32 in 1 tensor"
    assert lines[1].startswith("form tensors, wire fp32, transport shm x 2; 2 rounds after 1 of")
    head = ["median", "p99", "goodput", "of", "link", "idle", "CPU", "own", "CPU", "faults"]
    assert lines[2].split() == head
    cells = ["410.0", "us", "410.0", "us", "9.99", "MB/s", "-", "42%", "750.00", "ms", "17"]
    assert lines[3].split() == ["gradsum", *cells]
    assert lines[4].split()[:5] == ["gloo", "2.000", "s", "2.500", "s"]
    assert lines[-1] == "every element of every round is right"
    assert len({len(line) for line in lines[2:5]}) == 1


def test_the_table_shows_the_probes_and_claims_nothing_when_an_element_was_wrong() -> None:
    found = measured(gradsum=[9.0, 1.0, 1.0])
    found["contenders"]["gradsum"]["wrong"] = 3
    text = table(report(JOB, found, PROBE))
    assert "probed: TCP stream 2.000 GB/s, memory copy 8.000 GB/s, memory add 6.000 GB/s" in text
    assert "50%" in text
    assert "transport auto;" in text
    assert "is right" not in text


def test_units() -> None:
    shown = [duration(s) for s in (1.25e-5, 9.994e-4, 1e-3, 0.9994, 1.0, 61.0)]
    assert shown == ["12.5 us", "999.4 us", "1.00 ms", "999.40 ms", "1.000 s", "61.000 s"]
    assert [rate(r) for r in (0.0101, 0.1, 12.3456)] == ["10.10 MB/s", "0.100 GB/s", "12.346 GB/s"]
