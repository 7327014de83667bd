"""Shared memory: blocks, their lives, and segments that other processes map or refuse."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsum.errors import ProtocolError
from gradsum.proto.limits import MAX_INT
from gradsum.proto.local import Place, decode_place, encode_place
from gradsum.proto.transport.mapping import Mappings
from gradsum.proto.transport.segment import PAGE, Arena, home
from tests.proto.strategies import junk

SEGMENT = 16 * PAGE


@pytest.fixture
def arena() -> Iterator[Arena]:
    one = Arena(1 << 20, SEGMENT)
    yield one
    one.close()


def block(arena: Arena, nbytes: int) -> Any:
    taken = arena.take(nbytes)
    assert taken is not None and taken.nbytes == nbytes and taken.flags.writeable
    assert taken.ctypes.data % PAGE == 0
    return taken


def place_of(arena: Arena, buffer: Any) -> Place:
    found = arena.place(buffer)
    assert found is not None
    return found


PEER = """
import sys, numpy as np
from gradsum.proto.transport.segment import Arena
arena = Arena(1 << 24, 1 << 20)
block = arena.take(10_000)
block[:] = np.arange(10_000) % 251
print(*arena.place(block), flush=True)
for line in sys.stdin:
    block[:] = int(line)
    print("written", flush=True)
"""


class Peer:
    """Another process with an arena; ended by its pid."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.place = Place(*map(int, self.line().split()))

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def write(self, value: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{value}\n")
        self.process.stdin.flush()
        assert self.line() == "written\n"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def peer() -> Iterator[Peer]:
    one = Peer()
    yield one
    one.end()


def test_a_peer_sees_every_byte_and_later_writes_and_cannot_write_itself(peer: Peer) -> None:
    mappings = Mappings()
    view = mappings.view(peer.place, 10_000)
    assert bytes(view) == bytes(i % 251 for i in range(10_000))
    peer.write(7)
    assert bytes(view) == b"\x07" * 10_000
    assert view.readonly
    fd = os.open(f"/proc/{peer.place.pid}/fd/{peer.place.fd}", os.O_RDWR)
    try:
        with pytest.raises(OSError):
            mmap.mmap(fd, PAGE)  # F_SEAL_FUTURE_WRITE
        with pytest.raises(OSError):
            os.ftruncate(fd, PAGE)
    finally:
        os.close(fd)


def test_a_view_outlives_its_process_and_a_dead_one_is_not_mapped(peer: Peer) -> None:
    mappings = Mappings()
    view = mappings.view(peer.place, 10_000)
    peer.end()
    mappings.forget()
    assert bytes(view[:3]) == b"\x00\x01\x02"
    with pytest.raises(ProtocolError, match="cannot be opened"):
        mappings.view(peer.place, 1)


def test_nothing_has_a_name(arena: Arena) -> None:
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    block(arena, 100)
    assert (set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()) == before


def test_a_block_returns_with_its_last_reference_whatever_that_is(arena: Arena) -> None:
    def uses() -> list[Any]:
        one = block(arena, 5000)
        return [
            one, one[7:9], one.view(np.float32), np.asarray(one), memoryview(one)[1:],
            torch.frombuffer(one, dtype=torch.float32)[3:], np.frombuffer(one.data, np.int16),
        ]  # fmt: skip

    holders = uses()
    first = holders[0].ctypes.data
    for number in range(len(holders)):
        kept = holders[number]
        others = [other for i, other in enumerate(holders) if i > number]
        holders[number] = None
        del kept
        gc.collect()
        assert arena.used == (2 * PAGE if others else 0)
    assert block(arena, 6000).ctypes.data == first


def test_the_block_freed_last_is_taken_first_and_live_ones_are_apart(arena: Arena) -> None:
    one, two, three = (block(arena, PAGE) for _ in range(3))
    addresses = {one.ctypes.data, two.ctypes.data, three.ctypes.data}
    assert len(addresses) == 3
    last = two.ctypes.data
    del three, two
    assert block(arena, PAGE).ctypes.data == last
    assert block(arena, 2 * PAGE).ctypes.data not in addresses


def test_the_limit_and_what_is_larger_than_a_segment() -> None:
    arena = Arena(40 * PAGE, SEGMENT)
    large = block(arena, 20 * PAGE)
    rest = [block(arena, 10 * PAGE) for _ in range(2)]
    assert arena.take(1) is None and (arena.used, arena.capacity) == (40 * PAGE, 40 * PAGE)
    for each in (large, *rest):
        assert decode_place(encode_place(place_of(arena, each))) == arena.place(each)
    arena.close()
    assert arena.take(1) is None
    large[:] = 1  # memory that is in use stays


def test_another_size_begins_anew_when_nothing_is_in_use(arena: Arena) -> None:
    for size in range(1, 17):
        blocks = [block(arena, size * PAGE) for _ in range(16 // size)]
        assert arena.capacity <= SEGMENT
        del blocks


def test_place_knows_only_what_lies_wholly_inside(arena: Arena) -> None:
    one = block(arena, PAGE)
    inside = place_of(arena, one[100:200])
    assert inside.offset == place_of(arena, one).offset + 100 and inside.pid == os.getpid()
    assert arena.place(np.zeros(10, np.uint8)) is None
    assert arena.place(b"elsewhere") is None
    assert bytes(Mappings().view(inside, 100)) == one[100:200].tobytes()


def test_threads_never_share_a_block(arena: Arena) -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        for turn in range(300):
            taken = arena.take(PAGE * (1 + turn % 2))
            if taken is None:
                continue
            taken[:] = mark
            if not (taken == mark).all():
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong and arena.used == 0


def test_a_forked_child_hands_out_nothing(arena: Arena) -> None:
    one = block(arena, 10)
    child = os.fork()
    if child == 0:
        os._exit(0 if arena.take(1) is None and arena.place(one) is None else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_descriptors_are_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena, mappings = Arena(1 << 20, SEGMENT), Mappings()
    mappings.view(place_of(arena, block(arena, 10)), 10)
    arena.close()
    mappings.forget()
    del arena
    assert len(os.listdir("/proc/self/fd")) == before


def test_home_is_one_text_on_this_host() -> None:
    assert home() == home() and home().count(":") == 2
    program = "from gradsum.proto.transport.segment import home; print(home())"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                           timeout=30, check=True)  # fmt: skip
    assert shown.stdout.strip() == home()


# -- what is refused ---------------------------------------------------------------------------


def own(fd: int, offset: int = 0) -> Place:
    known = os.fstat(fd)
    return Place(os.getpid(), fd, known.st_dev, known.st_ino, offset)


def refused(place: Place, why: str, length: int = 1) -> None:
    with pytest.raises(ProtocolError, match=why):
        Mappings().view(place, length)


def test_a_segment_without_seals_is_refused() -> None:
    fd = os.memfd_create("naked", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    refused(own(fd), "not sealed against shrinking")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    refused(own(fd), "not sealed against shrinking")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert bytes(Mappings().view(own(fd), 1)) == b"\0"
    os.close(fd)


def test_a_sealed_segment_does_not_shrink(arena: Arena) -> None:
    place = place_of(arena, block(arena, 10))
    for size in (0, PAGE, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(place.fd, size)


def test_descriptors_that_are_no_segment_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * PAGE)
    with file.open("rb") as opened, open("/dev/null", "rb") as null:
        refused(own(opened.fileno()), "cannot be mapped|not sealed")
        refused(own(null.fileno()), "is no memory")
        reading, writing = os.pipe()
        refused(own(reading), "is no memory")
        os.close(reading)
        os.close(writing)
        refused(own(null.fileno())._replace(fd=9999), "cannot be opened")
    empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    refused(own(empty), "cannot be mapped")
    os.close(empty)


def test_another_file_than_the_named_one_is_refused(arena: Arena) -> None:
    place = place_of(arena, block(arena, 10))
    refused(place._replace(inode=place.inode + 1), "another file")
    refused(place._replace(device=place.device + 1), "another file")
    refused(place._replace(pid=MAX_INT), "cannot be opened")


def test_ever_new_segments_are_refused() -> None:
    mappings = Mappings(most=2)
    arenas = [Arena(1 << 20, SEGMENT) for _ in range(3)]
    places = [place_of(arena, block(arena, 10)) for arena in arenas]
    for place in places[:2]:
        mappings.view(place, 10)
    with pytest.raises(ProtocolError, match="more than 2 segments"):
        mappings.view(places[2], 10)
    for arena in arenas:
        arena.close()


PATTERN = np.arange(SEGMENT, dtype=np.uint32).view(np.uint8)[:SEGMENT]


@pytest.fixture(scope="module")
def filled() -> Iterator[tuple[Mappings, Place]]:
    arena = Arena(SEGMENT, SEGMENT)
    whole = block(arena, SEGMENT)
    whole[:] = PATTERN
    yield Mappings(), place_of(arena, whole)
    arena.close()


NUMBERS = st.one_of(st.integers(0, 2 * SEGMENT), st.integers(0, MAX_INT))


@given(offset=NUMBERS, length=NUMBERS, change=st.sampled_from(["", "pid", "fd", "device", "inode"]),
       to=NUMBERS)  # fmt: skip
def test_any_place_is_read_rightly_or_refused(
    filled: tuple[Mappings, Place], offset: int, length: int, change: str, to: int
) -> None:
    mappings, place = filled
    asked = place._replace(offset=offset)
    if change:
        asked = asked._replace(**{change: to})
    try:
        view = mappings.view(asked, length)
    except ProtocolError:
        assert asked[:4] != place[:4] or offset + length > SEGMENT
    else:
        assert asked[:4] == place[:4]
        assert bytes(view) == PATTERN[offset : offset + length].tobytes()


@given(junk())
def test_junk_is_no_place(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_place(raw)


@given(st.lists(st.one_of(st.integers(-5, MAX_INT), st.text(), st.booleans()), max_size=7))
def test_only_five_numbers_in_range_are_a_place(fields: list[Any]) -> None:
    from gradsum.proto.codec import pack

    good = len(fields) == 5 and all(type(f) is int and f >= 0 for f in fields)
    raw = pack(fields)
    if good and len(raw) <= 64:
        assert decode_place(raw) == tuple(fields)
    else:
        with pytest.raises(ProtocolError):
            decode_place(raw)
