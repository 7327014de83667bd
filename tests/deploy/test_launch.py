"""The launcher, with real processes and stub daemons: codes, output, and that nothing is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.processes import LIMIT, Processes

DRIVER = Path(__file__).with_name("stub_launch.py")
END = "import os, pathlib; pathlib.Path(os.environ['STUB_FOLDER'], 'end').touch()\n"


class Bench(Processes):
    """Starts launchers with stub daemons."""

    def start(
        self, *command: str, workers: int = 1, servers: int = 0, grace: float = 5.0, **env: str
    ) -> subprocess.Popen[str]:
        numbers = (str(workers), str(servers), str(grace))
        words = [sys.executable, str(DRIVER), *numbers, *command]
        return self.spawn(words, STUB_FOLDER=str(self.folder), **env)

    def python(self, code: str, **options: Any) -> subprocess.Popen[str]:
        return self.start(sys.executable, "-u", "-c", code, **options)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


Eventually = Callable[..., None]


def test_output_is_prefixed_per_rank_and_stream(bench: Bench) -> None:
    code = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    status, out, err = bench.end(bench.python(code, workers=2))
    assert status == 0
    assert sorted(out.splitlines()) == ["[w0] out 0", "[w1] out 1"]
    assert sorted(err.splitlines()) == ["[w0] err", "[w1] err"]


def test_long_interleaved_lines_stay_whole(bench: Bench) -> None:
    code = "import os\nfor i in range(300): print(os.environ['RANK'] * 3000)"
    status, out, _ = bench.end(bench.python(code, workers=2))
    assert status == 0
    assert set(out.splitlines()) == {"[w0] " + "0" * 3000, "[w1] " + "1" * 3000}
    assert len(out.splitlines()) == 600


def test_last_line_without_end_is_shown(bench: Bench) -> None:
    _, out, _ = bench.end(bench.python("import os; os.write(1, b'a\\nb')"))
    assert out == "[w0] a\n[w0] b\n"


def test_bytes_that_are_no_text_pass_through(bench: Bench) -> None:
    process = bench.python("import os; os.write(1, bytes([255, 254, 10]))")
    assert process.stdout is not None
    with open(process.stdout.fileno(), "rb", closefd=False) as raw:
        assert raw.read() == b"[w0] \xff\xfe\n"


def test_c92_values_arguments_and_interpreter_arrive_unchanged(bench: Bench) -> None:
    code = (
        "import json, os, sys\n"
        "e = {k: os.environ.get(k) for k in ('FOO.BAR', 'MSG')}\n"
        "print(json.dumps([e, sys.argv[1:], sys.executable, os.getcwd()]))"
    )
    argument, message = "--x=a b", 'a\n b\n"c"=d'
    variables: dict[str, Any] = {"FOO.BAR": "1", "MSG": message}
    process = bench.start(sys.executable, "-c", code, argument, "'", **variables)
    _, out, _ = bench.end(process)
    values = json.loads(out.removeprefix("[w0] "))
    assert values == [
        {"FOO.BAR": "1", "MSG": message}, [argument, "'"], sys.executable, str(bench.folder),
    ]  # fmt: skip


def test_c92_rank_variables_win_over_inherited_ones(bench: Bench) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
             "GRADSUM_COORDINATOR", "GRADSUM_RANK", "TORCHELASTIC_RUN_ID")  # fmt: skip
    code = f"import os; print(*[os.environ.get(n) for n in {names}])"
    inherited = dict.fromkeys(names, "77")
    _, out, _ = bench.end(bench.python(code, workers=2, **inherited))
    tail = "127.0.0.1 127.0.0.1:1234 None None"
    assert sorted(out.splitlines()) == [f"[w{r}] {r} 2 {r} 2 {tail}" for r in (0, 1)]


def test_threads_are_limited_only_for_several_workers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; print(os.environ.get('OMP_NUM_THREADS'))"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert sorted(bench.end(bench.python(code, workers=2))[1].split()) == ["1", "1", "[w0]", "[w1]"]
    assert bench.end(bench.python(code))[1] == "[w0] None\n"
    assert bench.end(bench.python(code, workers=2, OMP_NUM_THREADS="3"))[1].count("3") == 2


@pytest.mark.slow
def test_c19_first_failing_rank_gives_the_code_and_ends_the_others(bench: Bench) -> None:
    code = (
        "import os, sys, time\nif os.environ['RANK'] == '1': raise SystemExit(7)\ntime.sleep(600)"
    )
    start = time.monotonic()
    status, _, err = bench.end(bench.python(code, workers=3, servers=1))
    assert status == 7
    assert time.monotonic() - start < 15
    assert err.count("gradsum launch: rank 1 failed with exit code 7") == 1
    assert not bench.alive()


@pytest.mark.slow
def test_c19_exception_is_named_and_its_traceback_shown_once(bench: Bench) -> None:
    code = (
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('boom')\ntime.sleep(600)"
    )
    status, _, err = bench.end(bench.python(code, workers=3, servers=1))
    assert status == 1
    assert err.count("Traceback") == 1
    assert err.splitlines()[-1] == (
        "gradsum launch: rank 1 failed with exit code 1: ValueError: boom"
    )


@pytest.mark.slow
def test_c19_killed_rank_gives_137(bench: Bench) -> None:
    code = (
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(600)"
    )
    status, _, err = bench.end(bench.python(code, workers=3))
    assert status == 137
    assert "rank 1 was killed by SIGKILL (out of memory?), exit code 137" in err


@pytest.mark.slow
def test_c19_crashed_server_ends_the_job_and_is_named(bench: Bench) -> None:
    code = (
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['STUB_FOLDER'], 'crash').touch()\n"
        "time.sleep(600)"
    )
    status, _, err = bench.end(bench.python(code, workers=2, servers=1, STUB_SERVER="crash"))
    assert status == 137
    assert "gradsum launch: server 0 (pid" in err
    assert "was killed by SIGKILL" in err


@pytest.mark.slow
def test_c19_a_victim_that_ends_first_is_not_blamed(bench: Bench) -> None:
    code = (
        "import os, pathlib, sys, time\n"
        "flag = pathlib.Path(os.environ['STUB_FOLDER'], 'flag')\n"
        "if os.environ['RANK'] == '0':\n"
        "    flag.touch()\n"
        "    sys.exit('gradsum.errors.PeerLost: rank 1 is gone')\n"
        "while not flag.exists(): time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "sys.exit(7)"
    )
    status, _, err = bench.end(bench.python(code, workers=2, servers=1))
    assert status == 7
    assert err.count("gradsum launch:") == 1
    assert "rank 1 failed with exit code 7" in err


def test_c89_job_ends_with_zero_and_no_error_lines(bench: Bench) -> None:
    code = END + "print('done')"
    status, out, err = bench.end(bench.python(code, workers=2, servers=2))
    assert status == 0
    assert sorted(out.splitlines()) == ["[w0] done", "[w1] done"]
    assert err == ""


def test_c89_daemons_are_told_to_end_after_the_last_worker(bench: Bench) -> None:
    start = time.monotonic()
    process = bench.python("pass", servers=1)
    assert bench.end(process)[0] == 0
    assert time.monotonic() - start < 10


def test_c89_a_daemon_that_fails_fails_the_job(bench: Bench) -> None:
    code = END + "import time; time.sleep(60)"
    status, _, err = bench.end(bench.python(code, servers=1, STUB_SERVER="fail"))
    assert status == 1
    assert "gradsum launch: server 0 (pid" in err
    assert "failed with exit code 1" in err


@pytest.mark.slow
def test_c85_a_coordinator_that_cannot_bind_ends_the_launch_at_once(bench: Bench) -> None:
    start = time.monotonic()
    status, _, err = bench.end(bench.python(END, servers=1, STUB_COORDINATOR="busy"))
    assert status == 2
    assert time.monotonic() - start < 5
    assert "failed with exit code 2: gradsum: cannot listen" in err


@pytest.mark.slow
def test_a_coordinator_that_never_gets_ready_has_a_deadline(bench: Bench) -> None:
    status, _, err = bench.end(bench.python(END, servers=1, STUB_COORDINATOR="mute"))
    assert status == 1
    assert "not ready after 3 s" in err


def test_daemons_are_quiet_unless_asked(bench: Bench) -> None:
    _, out, err = bench.end(bench.python(END, servers=1))
    assert "ready" not in out + err
    (bench.folder / "end").unlink()
    _, out, err = bench.end(bench.python(END, servers=1, STUB_VERBOSE="1"))
    assert "[coordinator] coordinator ready" in err
    assert "[s0] server ready" in err
    assert "[s0] log line" in err, "a line that names its speaker gets no second name"
    assert "ready" not in out


TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("up", flush=True)
end = time.monotonic() + 1.5
while time.monotonic() < end: time.sleep(0.01)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
time.sleep(600)
"""


def _start_tree(bench: Bench, **options: Any) -> subprocess.Popen[str]:
    """Workers behind a shell, each with a grandchild in a session of its own; all are up."""
    (bench.folder / "train.py").write_text(TREE)
    shell = f"{sys.executable} train.py & wait; true"
    process = bench.start("bash", "-c", shell, workers=2, servers=1, **options)
    assert process.stdout is not None
    for _ in range(2):
        assert "up" in process.stdout.readline()
    assert len(bench.alive()) >= 9
    return process


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_c34_a_signal_leaves_no_descendant(bench: Bench, number: int, code: int) -> None:
    process = _start_tree(bench, grace=3.0)
    start = time.monotonic()
    process.send_signal(number)
    status, _, err = bench.end(process)
    assert status == code
    assert time.monotonic() - start < 8
    assert not bench.alive()
    assert signal.Signals(number).name in err


@pytest.mark.slow
def test_c34_a_second_interrupt_kills_at_once(bench: Bench) -> None:
    process = _start_tree(bench, grace=20.0, STUB_SERVER="deaf")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "SIGINT" not in process.stderr.readline():
        pass
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert bench.end(process)[0] == 130
    assert time.monotonic() - start < 3
    assert not bench.alive()


@pytest.mark.slow
def test_c34_an_interrupt_right_after_the_note_is_the_second(bench: Bench) -> None:
    process = _start_tree(bench, grace=20.0, STUB_SERVER="deaf", STUB_AGAIN="1")
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert bench.end(process)[0] == 130
    assert time.monotonic() - start < 6
    assert not bench.alive()


@pytest.mark.slow
def test_c34_a_killed_launcher_takes_its_children_along(
    bench: Bench, eventually: Eventually
) -> None:
    process = bench.python("import time; print('up'); time.sleep(600)", workers=2, servers=2)
    assert process.stdout is not None
    for _ in range(2):
        assert "up" in process.stdout.readline()
    process.kill()
    eventually(lambda: not bench.alive(), limit=5.0)


@pytest.mark.slow
def test_a_deaf_daemon_is_killed_after_grace(bench: Bench) -> None:
    code = "import sys; sys.exit(5)"
    status, _, _ = bench.end(bench.python(code, servers=1, STUB_SERVER="deaf", grace=1.0))
    assert status == 5
    assert not bench.alive()


def test_strays_of_a_good_job_end_too(bench: Bench) -> None:
    code = END + "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    status, _, _ = bench.end(bench.python(code, servers=1))
    assert status == 0
    assert not bench.alive()


def test_a_reader_that_goes_away_does_not_end_the_job(bench: Bench) -> None:
    code = "import os\nfor i in range(20000): print(i)\nopen('finished', 'w').close()"
    process = bench.python(code)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(LIMIT) == 0
    assert (bench.folder / "finished").exists()


def test_a_program_that_cannot_start_is_named(bench: Bench) -> None:
    status, _, err = bench.end(bench.start("/nowhere/train", servers=1))
    assert status != 0
    assert "/nowhere/train" in err
