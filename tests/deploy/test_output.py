"""Lines are cut and named; progress bars neither flood a file nor tear a terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsum.deploy.output import MAX_LINE, Console, Lines


class Screen(io.BytesIO):
    """A stream that may claim to be a terminal."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def shown(self) -> list[str]:
        """What a terminal shows in the end: \\r overwrites, ESC[K clears."""
        rows = self.getvalue().decode().split("\n")
        return [row.replace("\r\x1b[K", "\r").rpartition("\r")[2] for row in rows]


@given(st.lists(st.binary(max_size=20)).map(b"\n".join), st.lists(st.integers(0, 99)))
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, cuts: list[int]) -> None:
    data = data.replace(b"\r", b"")
    marks = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    lines, found = Lines(), []
    for start, end in zip(marks, marks[1:], strict=False):
        found += lines.feed(data[start:end])
    rest = lines.close()
    expected = data.split(b"\n")
    assert found == expected[:-1]
    assert rest == ([expected[-1]] if expected[-1].strip() else [])


@pytest.mark.parametrize("cut", range(9))
def test_crlf_is_one_line_end(cut: int) -> None:
    lines, data = Lines(), b"ab\r\ncd\r\n"
    assert lines.feed(data[:cut]) + lines.feed(data[cut:]) == [b"ab", b"cd"]


def test_a_bar_shows_its_newest_state_and_ends_as_one_line() -> None:
    lines = Lines()
    assert lines.bar is None
    assert lines.feed(b"\r 10%|#") == []
    assert lines.bar == b" 10%|#"
    lines.feed(b"\r 20")
    lines.feed(b"%|##")
    assert lines.bar == b" 20%|##"
    lines.feed(b"\r")
    assert lines.feed(b"100%|##########\nnext") == [b"100%|##########"]
    assert lines.bar is None
    assert lines.close() == [b"next"]


def test_memory_of_an_endless_line_is_bounded() -> None:
    lines = Lines()
    found = [line for _ in range(40) for line in lines.feed(b"x" * 65_536)]
    assert sum(map(len, found)) >= MAX_LINE
    for _ in range(40):
        lines.feed(b"\r" + b"y" * 65_536)
    assert len(lines._rest) <= 2 * 65_536 + 2


def test_streams_stay_apart_and_lines_are_named_once() -> None:
    out, err = Screen(), Screen()
    console = Console(out, err)
    console.line(1, "w0", b"to out")
    console.line(2, "w1", b"to err")
    console.line(2, "s0", b"[s3] 12:00:00 WARNING x")
    console.line(2, "w4", b"[w] 12:00:00 WARNING y")
    console.line(1, "w0", b"[data] is no name")
    assert out.getvalue() == b"[w0] to out\n[w0] [data] is no name\n"
    assert err.getvalue() == (b"[w1] to err\n[s3] 12:00:00 WARNING x\n[w4] 12:00:00 WARNING y\n")


def test_a_bar_in_a_file_is_a_line_now_and_then() -> None:
    now, err = [0.0], Screen()
    console = Console(Screen(), err, lambda: now[0])
    for percent in range(100):
        now[0] += 0.25
        console.bar(2, "w0", f"{percent}%".encode())
    assert err.getvalue() == b"[w0] 0%\n[w0] 40%\n[w0] 80%\n"


def test_a_bar_on_a_terminal_stays_below_the_lines() -> None:
    screen = Screen(terminal=True)
    console = Console(screen, screen)
    console.bar(2, "w0", b"10%")
    console.line(1, "w1", b"hello")
    console.bar(1, "w0", None)  # nothing overwritten on the other stream: the bar stays
    console.bar(2, "w0", b"20%")
    assert screen.shown() == ["[w1] hello", "[w0] 20%"]
    console.line(2, "w0", b"100%")
    console.bar(2, "w0", None)
    assert screen.shown() == ["[w1] hello", "[w0] 100%", ""]


def test_a_bar_is_cut_to_the_terminal() -> None:
    screen = Screen(terminal=True)
    Console(screen, screen).bar(2, "w0", b"#" * 500)
    assert len(screen.shown()[0]) <= 80
