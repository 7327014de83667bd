"""The lab of namespaces: made, shaped, counted, and gone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.links import PREFIX, Lab, Unavailable, burst, remove_dead, require, run
from benchmarks.probe import streams

pytestmark = [pytest.mark.netns, pytest.mark.slow]


@pytest.fixture(autouse=True)
def possible() -> Iterator[None]:
    try:
        require()
        run("ip", "netns", "add", f"{PREFIX}{os.getpid()}-try")
        run("ip", "netns", "delete", f"{PREFIX}{os.getpid()}-try")
    except Unavailable as why:
        pytest.skip(str(why))
    yield


def left_over() -> list[str]:
    mine = f"{PREFIX}{os.getpid()}"
    shown = run("ip", "netns", "list") + run("ip", "-o", "link", "show")
    return [line for line in shown.splitlines() if mine in line]


def test_links_carry_their_rate_in_both_directions_and_a_lab_leaves_nothing() -> None:
    with Lab(["a", "b", "c"], 200.0) as lab:
        before = lab.counters("b")
        up, down = (s.rate for s in streams(lab, [("a", "b"), ("b", "a")], 0.6))
        after = lab.counters("b")
        for rate in (up, down):
            assert 0.80 < rate * 8 / 200e6 < 1.02
        for way in ("received", "sent"):
            assert getattr(after, way) - getattr(before, way) > 0.5 * 0.6 * 200e6 / 8
        assert lab.counters("c").sent < 100_000
        shown = run(*lab.command("c", ["hostname"]))
        assert shown.strip() == "c" and run("hostname").strip() != "c"
        lab.set_rate("a", 50.0)
        assert streams(lab, [("a", "c")], 0.6)[0].rate * 8 < 80e6
    assert left_over() == []


def test_what_a_killed_run_has_left_is_removed() -> None:
    dead = f"{PREFIX}{2**22 + 1}"  # beyond the highest process id
    run("ip", "netns", "add", f"{dead}-x")
    run("ip", "link", "add", f"{dead}b", "type", "bridge")
    assert not Path("/proc", dead.removeprefix(PREFIX)).exists()
    assert dead in remove_dead()
    assert dead not in run("ip", "netns", "list") + run("ip", "-o", "link", "show")


def test_a_bucket_holds_what_comes_between_two_ticks() -> None:
    assert burst(10) == 128 << 10 and burst(500) == 500_000
