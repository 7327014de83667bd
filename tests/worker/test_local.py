"""The session of one rank: same face, same checks, nothing on the network."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from gradsum.config import load
from gradsum.errors import MismatchError, NotBuilt, ProtocolError, UsageError
from gradsum.scheduler.policy import Policy
from gradsum.scheduler.table import TensorSpec
from gradsum.worker.face import Session
from gradsum.worker.local import LocalSession
from gradsum.worker.sinks import TensorSink
from gradsum.worker.tensors import wire_bytes


def spec(name: str, elements: int = 2, policy: Policy | None = None) -> TensorSpec:
    return TensorSpec(name, "float32", "float32", (elements,), policy or Policy())


@pytest.fixture
def session() -> LocalSession:
    return LocalSession(load({}, {}))


def test_c101_the_sum_of_one_rank_is_there_at_once(session: LocalSession) -> None:
    whole: Session = session  # the face, checked by mypy
    assert (whole.rank, whole.size, whole.local_rank, whole.local_size) == (0, 1, 0, 1)
    (key,) = whole.register([spec("x")])
    got = torch.zeros(2)
    source = wire_bytes(torch.tensor([1.0, 2.0]))
    handle = whole.submit(key, 1, source, TensorSink(got, "float32", True))
    assert handle.done() and handle.wait() == (True, 1) and handle.name == "x"
    assert got.tolist() == [1, 2]


def test_absent_is_not_present(session: LocalSession) -> None:
    (key,) = session.register([spec("x")])
    got = torch.ones(2)
    assert session.submit(key, 1, None, TensorSink(got, "float32", True)).wait() == (False, 1)
    assert got.tolist() == [1, 1]


def test_versions_follow_one_another(session: LocalSession) -> None:
    (key,) = session.register([spec("x")._replace(first=3)])
    session.submit(key, 3, None, None)
    with pytest.raises(ProtocolError, match="version 5 of 'x' after 3"):
        session.submit(key, 5, None, None)


def test_names_are_checked_as_in_a_job(session: LocalSession) -> None:
    first = session.register([spec("x"), spec("y")])
    assert session.register([spec("y"), spec("x")], "opt0") == first[::-1]
    with pytest.raises(MismatchError, match=r"'x' is float32\[2\], not float32\[3\]"):
        session.register([spec("x", 3)])
    with pytest.raises(NotBuilt):
        session.register([spec("z", policy=Policy(slack=1))])
    with pytest.raises(ProtocolError):
        session.register([spec("n" * 300)])


def test_all_ranks_are_one(session: LocalSession) -> None:
    assert session.gather("t", [1]) == {0: [1]}
    with pytest.raises(UsageError, match="more than"):
        session.gather("t", b"x" * 70_000)
    session.barrier()
    session.mark_step()
    assert session.join() == 0
    assert [session.next_group(), session.next_group()] == ["opt0", "opt1"]
    assert session.firings("opt0") is None
    session.report_window("opt0", {3: 2}, [3])
    assert session.firings("opt0") == {3: 2}
    assert session.speed()[1] >= 0


def test_closed_and_forked_sessions_say_so(session: LocalSession) -> None:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            session.check()
            theirs.sendall(b"no error")
        except UsageError as error:
            theirs.sendall(str(error).encode())
        finally:
            os._exit(0)
    ours.settimeout(10)
    assert b"forked after gradsum.init()" in ours.recv(1000)
    os.waitpid(child, 0)
    session.close()
    session.close()
    with pytest.raises(UsageError, match=r"closed(?s:.*)init\(\)"):
        session.barrier()
