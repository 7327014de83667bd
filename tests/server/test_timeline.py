"""What a server's frames become: one add a contribution and one arrow a reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradsum.proto import peer
from gradsum.scheduler.table import TensorSpec
from gradsum.server import engine as serving
from gradsum.server.timeline import Timeline
from gradsum.trace import SliceArgs, Span, Trace
from tests.sim.build import OneServer, array, plan, spec


class Watched(OneServer):
    """An engine whose frames are seen as its shard would show them; each look at the clock takes
    a second."""

    def __init__(self, folder: Path, *specs: TensorSpec, **changes: Any) -> None:
        self.timeline: Timeline | None = None
        super().__init__(*specs, **changes)
        trace = Trace(folder, "server")
        trace.number = 6
        self.timeline = Timeline(trace, self.engine, self._clock)
        self.seconds = 0

    def _clock(self) -> float:
        self.seconds += 1
        return self.seconds

    def step(self, event: serving.Event) -> list[serving.Action]:
        timeline = self.timeline
        if timeline is None:
            return super().step(event)
        if isinstance(event, serving.Frame):
            actions = timeline.step(event, self.now)
        else:
            actions = self.engine.step(event, self.now)
        for action in actions:
            if isinstance(action, serving.SendSum):
                timeline.sends(action, self.sums.append)
        return actions

    @property
    def spans(self) -> list[Span]:
        assert self.timeline is not None
        return self.timeline.trace._first

    def found(self) -> list[tuple[str, float, float, int | None]]:
        return [
            (s.kind, s.start, s.end, s.args.rank)
            for s in self.spans
            if isinstance(s.args, SliceArgs)
        ]

    def arrows(self) -> list[tuple[str, float, str]]:
        return [(s.flow.end, s.flow.at, s.flow.ident) for s in self.spans if s.flow]


def test_contributions_gather_and_their_sum_goes_to_every_reader(tmp_path: Path) -> None:
    server = Watched(tmp_path, spec("layer.weight"))
    server.push(0, 1, array(1, 2, 3, 4), priority=3)
    server.push(1, 1, array(1, 2, 3, 4), priority=3)
    assert server.found() == [
        ("add", 1, 2, 0), ("add", 3, 4, 1), ("gather", 1, 4, None),
        ("queue", 4, 5, 0), ("reply", 5, 6, 0), ("queue", 4, 7, 1), ("reply", 7, 8, 1),
    ]  # fmt: skip
    assert {s.name for s in server.spans} == {"layer.weight"}
    assert tuple(server.spans[0].args) == (0, 0, 1, 0, 16, 3, 6, 1)
    assert server.arrows() == [
        ("f", 1, "c.10 k0.0 v1 r0 push"), ("f", 3, "c.11 k0.0 v1 r1 push"),
        ("s", 5, "c.10 k0.0 v1 r0 sum"), ("s", 7, "c.11 k0.0 v1 r1 sum"),
    ]  # fmt: skip


def test_repeated_and_refused_pushes_leave_no_mark(tmp_path: Path) -> None:
    server = Watched(tmp_path)
    server.push(0, 1, array(1, 2, 3, 4))
    server.push(0, 1, array(1, 2, 3, 4))
    server.push(0, 3, array(1, 2, 3, 4))
    assert [s.kind for s in server.spans] == ["add"]


def test_a_repeated_reply_has_no_second_arrow(tmp_path: Path) -> None:
    server = Watched(tmp_path)
    for rank in (0, 1):
        server.push(rank, 1, array(1, 2, 3, 4))
    server.now += 30.0
    server.say(1, peer.Pull(0, 0, 1))
    assert [s.rank for s in server.sums] == [0, 1, 1]
    kinds = [s.kind for s in server.spans]
    assert (kinds.count("reply"), kinds.count("queue")) == (3, 2)
    assert len({ident for _, _, ident in server.arrows()}) == len(server.arrows()) == 4


def test_a_push_that_comes_before_its_table_is_named_once_it_is_known(tmp_path: Path) -> None:
    server = Watched(tmp_path, spec("a"))
    server.push(0, 1, array(1, 2, 3, 4), key=1)
    assert not server.spans
    server.step(serving.Extend(1, (spec("late"),)))
    server.push(1, 1, array(1, 2, 3, 4), key=1)
    assert [(s.kind, s.name) for s in server.spans[:3]] == [
        ("add", "late"), ("add", "late"), ("gather", "late")
    ]  # fmt: skip
    assert server.found()[0] == ("add", 1, 2, 0)
    assert server.found()[2][:2] == ("gather", 1)


def test_a_sum_that_a_leaving_rank_completes_is_gathered_when_it_leaves(tmp_path: Path) -> None:
    server = Watched(tmp_path)
    server.push(0, 1, array(1, 2, 3, 4))
    server.say(1, peer.Standing())
    assert server.found() == [
        ("add", 1, 2, 0), ("gather", 1, 3, None), ("queue", 3, 3, 0), ("reply", 3, 4, 0)
    ]  # fmt: skip


def test_a_deterministic_server_shows_arrivals_and_what_is_kept_is_bounded(tmp_path: Path) -> None:
    server = Watched(tmp_path, workers=3, deterministic=True)
    for version in range(1, 21):
        for rank in (2, 0, 1):
            server.push(rank, version, array(1, 2, 3, 4))
    adds = [args for kind, *args in server.found() if kind == "add"]
    assert [rank for _, _, rank in adds[:3]] == [2, 0, 1]
    assert len(adds) == 60
    assert len([s for s in server.spans if s.kind == "gather"]) == 20
    assert server.timeline is not None
    assert len(server.timeline._rounds) == 2
    server.timeline.forget()
    server.step(serving.Reset())
    server.step(serving.Extend(0, (spec("next"),)))
    server.step(serving.Adopt(plan(3), 0))
    assert not server.timeline._rounds
