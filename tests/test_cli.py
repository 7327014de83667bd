"""The command line: options alike with - and _, errors without tracebacks, codes by kind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradsum import cli
from gradsum.arguments import parse
from gradsum.errors import (
    ConfigError,
    GradsumError,
    NotBuilt,
    PeerLost,
    Refused,
    Unreachable,
    UsageError,
)

COMMANDS = ("coordinator", "server", "launch", "status", "tune", "doctor", "bench", "plan",
            "trace", "version")  # fmt: skip


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def usage_error(*words: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"gradsum {command}" in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gradsum"] in text


def test_dashes_and_underscores_are_alike_before_the_script_only() -> None:
    args = parse(["launch", "--nproc_per_node", "3", "--slice_bytes=2M", "a.py", "--my_opt"])
    assert (args.nproc_per_node, args.slice_bytes, args.words) == (3, "2M", ["a.py", "--my_opt"])


def test_settings_are_options() -> None:
    args = parse(["server", "--coordinator", "h:1", "--credit-bytes", "3M", "--insecure"])
    assert (args.coordinator, args.credit_bytes, args.insecure) == ("h:1", "3M", True)
    assert args.deterministic is None, "not given is not the same as off"


@pytest.mark.parametrize(
    "words",
    [[], ["nonsense"], ["coordinator"], ["coordinator", "--workers", "0", "--servers", "1"],
     ["launch", "--servers", "-1", "--", "x"], ["launch", "--grace", "nan", "--", "x"],
     ["status", "--time", "3"]],
)  # fmt: skip
def test_wrong_usage_ends_with_2(words: list[str]) -> None:
    usage_error(*words)


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a"), 2), (UsageError("a"), 2), (NotBuilt("a"), 2), (Unreachable("a"), 3),
     (PeerLost("a"), 4), (Refused("a"), 1), (GradsumError("a"), 1)],
)  # fmt: skip
def test_exit_code_by_kind_of_error(
    error: GradsumError,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: object) -> int:
        raise type(error)("it broke", hint="mend it")

    monkeypatch.setattr(cli, "_COMMANDS", {"version": fail})
    assert cli.main(["version"]) == code
    assert capsys.readouterr().err == "gradsum: it broke\n  hint: mend it\n"


def test_c35_bad_setting_is_named_with_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--slice-bytes", "abc"]) == 2
    err = capsys.readouterr().err
    assert "--slice-bytes" in err
    assert "'abc'" in err


def test_c101_missing_coordinator_is_said_with_all_ways_to_set_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["server"]) == 2
    err = capsys.readouterr().err
    assert "--coordinator" in err
    assert "GRADSUM_COORDINATOR" in err


def test_c91_listening_beyond_loopback_needs_to_be_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["coordinator", "--workers", "1", "--servers", "1", "--bind"]
    for address in ("0.0.0.0:0", "192.0.2.1:0"):
        assert cli.main([*words, address]) == 2
        assert address.removesuffix(":0") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "missing.py"], "does not exist"),
        (["--standalone", "--coordinator", "h:1", "--", "true"], "--standalone"),
        (["--servers", "2", "--", "true"], "--servers belongs to --standalone"),
        (["--standalone", "--nnodes", "2", "--node-rank", "0", "--", "true"], "one launcher"),
        (["--nproc-per-node", "2", "--", "true"], "need a coordinator"),
        (["--nnodes", "2", "--", "true"], "--node-rank"),
        (["--"], "nothing to run"),
        (["--credit-bytes", "0", "--", "true"], "--credit-bytes"),
    ],
)
def test_launch_refuses_what_cannot_work(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_missing_script_is_refused_in_under_a_second(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gradsum", "launch", "--standalone", "--", "python", "no.py"]
    subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=30, check=False)  # warm
    start = time.monotonic()
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=30, check=False)
    assert time.monotonic() - start < 1.0
    assert done.returncode == 2
    assert b"script 'no.py' does not exist" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_launch_gives_settings_to_its_children(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("lease = 11")
    (tmp_path / "show.py").write_text(
        "import os, sys\n"
        "names = ('GRADSUM_SLICE_BYTES', 'GRADSUM_DETERMINISTIC', 'GRADSUM_JOB')\n"
        "print(*[os.environ[n] for n in names], sys.argv[1:])\n"
        "print(os.environ['GRADSUM_CONFIG'])\n"
    )
    words = ["--config", "a.toml", "--slice-bytes", "4K", "--deterministic", "--job", "j"]
    done = subprocess.run(
        [sys.executable, "-m", "gradsum", "launch", *words, "--", "python", "show.py", "--", "-m"],
        cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "[w0] 4K 1 j ['--', '-m']", f"[w0] {tmp_path / 'a.toml'}"]  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_launch_says_once_that_a_variable_means_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSUM_SLICE_BYTE", "7")
    words = ["launch", "--standalone", "--servers", "2", "--", "true"]
    done = subprocess.run(
        [sys.executable, "-m", "gradsum", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.count("GRADSUM_SLICE_BYTE means nothing") == 1
    assert "did you mean GRADSUM_SLICE_BYTES?" in done.stderr
