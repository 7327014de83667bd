"""The probes give plausible rates, and say so when nothing comes."""

from __future__ import annotations

import socket

import pytest

from gradsum.deploy import bench_probe
from gradsum.errors import Unreachable
from gradsum.proto.transport import probe as stream

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.slow
def test_the_stream_and_the_memory_have_rates_of_a_real_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_probe, "_SECONDS", 0.1)
    found = bench_probe.probe()
    assert 0.01 < found.stream_gb_per_second < 200
    assert 0.05 < found.copy_gb_per_second < 1000
    assert 0.05 < found.add_gb_per_second < 1000


def test_a_stream_that_never_comes_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LIMIT", 0.05)
    with stream.StreamProbe() as receiver, pytest.raises(Unreachable, match="heard nothing"):
        receiver.rate()


def test_a_stream_that_is_silent_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LIMIT", 0.05)
    with (
        stream.StreamProbe() as receiver,
        socket.create_connection(("127.0.0.1", receiver.port), 5.0),
        pytest.raises(Unreachable, match="heard nothing"),
    ):
        receiver.rate()


@pytest.mark.parametrize("said", [b"", b"x"])
def test_a_stream_without_a_second_read_has_no_rate(said: bytes) -> None:
    with stream.StreamProbe() as receiver:
        with socket.create_connection(("127.0.0.1", receiver.port), 5.0) as sender:
            sender.sendall(said)
        with pytest.raises(Unreachable, match="ended before it began"):
            receiver.rate()
