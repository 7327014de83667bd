"""The options of every ``gradsum`` command.

Rules: ``-`` and ``_`` are alike in long options. Options that are settings come from the settings
table and stay text here: ``config.load`` reads them, so that a bad value is refused with the same
words whether it came from a flag, a variable or a file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from gradsum.config import options
from gradsum.values import Kind, count, seconds

DEFAULT_PORT = 7700
_ELSEWHERE = ("bench", "plan")
"""Commands whose options are in a module of their own, read only for them."""

_LOGGING = ("log_level", "log_format")
_LIVENESS = ("heartbeat", "suspect", "lease")
_FLOW = ("transport", "schedule", "slice_bytes", "credit_bytes", "skew_bytes", "pack_bytes",
         "park_bytes")  # fmt: skip
_TUNING = ("tune", "tune_file")
_LIMITS = ("max_tensors", "max_job_bytes")
_DAEMON = ("insecure", "deterministic", *_FLOW, *_LIMITS, *_LIVENESS, "start_timeout",
           "connect_timeout", "shutdown_timeout", *_LOGGING)  # fmt: skip
_WORKER = ("deterministic", "nan_guard", "share_gradients", *_FLOW, *_LIMITS, *_LIVENESS,
           "start_timeout", "connect_timeout", "stall_warning", "stall_timeout", "request_timeout",
           "shutdown_timeout", "trace", *_LOGGING)  # fmt: skip


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options of ``words``; ends the process with 2 and the usage for wrong ones."""
    parser = argparse.ArgumentParser(
        prog="gradsum", description="Sums the gradients of torch training jobs.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, add_options) in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name not in _ELSEWHERE or list(words[:1]) == [name]:
            add_options(sub)
        _alias(sub)
    return parser.parse_args(words)


def _alias(parser: argparse.ArgumentParser) -> None:
    """Accept --a_b for --a-b without showing both in --help, as torchrun does."""
    known = parser._option_string_actions
    for text, action in list(known.items()):
        if text.startswith("--"):
            known.setdefault("--" + text[2:].replace("-", "_"), action)


def _settings_options(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Options of the settings table; not given means None."""
    group = parser.add_argument_group("settings", "also as GRADSUM_<NAME> or in gradsum.toml")
    group.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for option in options():
        if option.name not in names:
            continue
        text = option.doc.replace("%", "%%")
        if option.kind.metavar == "BOOL":
            group.add_argument(option.flag, action="store_const", const=True, help=text)
        else:
            shown = "" if option.default is None else f" (default {option.default})"
            group.add_argument(option.flag, metavar=option.kind.metavar, help=text + shown)


def _typed(kind: Kind) -> Callable[[str], object]:
    """An argparse type for options that are no settings."""

    def read(text: str) -> object:
        try:
            return kind.read(text)
        except (ValueError, TypeError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind.allowed}") from None

    return read


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def _coordinator_options(parser: argparse.ArgumentParser) -> None:
    number = _typed(count(1))
    parser.add_argument(
        "--bind",
        metavar="HOST:PORT",
        help=f"where to listen (default 127.0.0.1:{DEFAULT_PORT}; port 0: any)",
    )
    parser.add_argument(
        "--workers", type=number, required=True, metavar="N", help="workers of a job"
    )
    parser.add_argument(
        "--servers", type=number, required=True, metavar="K", help="server shards to wait for"
    )
    parser.add_argument("--once", action="store_true", help="end with the first job")
    parser.add_argument("--port-file", type=Path, metavar="FILE", help="write HOST:PORT there")
    _settings_options(parser, (*_TUNING, *_DAEMON))  # fmt: skip


def _server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shards",
        type=_typed(count(1)),
        default=1,
        metavar="S",
        help="processes, each one server (default 1; at most one a core)",
    )
    parser.add_argument("--once", action="store_true", help="end with the first job")
    parser.add_argument("--port-file", type=Path, metavar="FILE", help="write HOST:PORT there")
    _settings_options(parser, ("coordinator", "bind", "advertise", "trace", *_DAEMON))  # fmt: skip


def _launch_options(parser: argparse.ArgumentParser) -> None:
    number, index, port = _typed(count(1)), _typed(count(0)), _typed(count(1))
    parser.usage = "gradsum launch [options] -- python train.py [arguments]"
    add = parser.add_argument
    add(
        "--standalone",
        action="store_true",
        help="start a coordinator and servers on this machine, for this job only",
    )
    add("--servers", type=number, metavar="K", help="servers of --standalone (default 1)")
    add("--nproc-per-node", type=number, default=1, metavar="P", help="workers here (default 1)")
    add("--nnodes", type=number, metavar="N", help="launchers of the job (default 1, or Slurm's)")
    add("--node-rank", type=index, metavar="R", help="which of them this is")
    add("--master-addr", metavar="HOST", help="MASTER_ADDR for torch.distributed")
    add("--master-port", type=port, metavar="PORT", help="MASTER_PORT for torch.distributed")
    add("-m", "--module", action="store_true", help="the command is a Python module")
    add("--no-python", action="store_true", help="the command is a program, not a script")
    add(
        "--grace",
        type=_typed(seconds()),
        default=10.0,
        metavar="SECONDS",
        help="between SIGTERM and SIGKILL (default 10)",
    )
    add("-v", "--verbose", action="store_true", help="show what the daemons say, too")
    add("words", nargs=argparse.REMAINDER, metavar="command", help="what to run")
    _settings_options(parser, ("coordinator", "job", *_TUNING, *_WORKER))  # fmt: skip


def _status_options(parser: argparse.ArgumentParser) -> None:
    _json(parser)
    parser.add_argument(
        "--timeout",
        type=_typed(seconds()),
        default=5.0,
        metavar="SECONDS",
        help="to wait for the answer (default 5)",
    )
    _settings_options(parser, ("coordinator",))  # fmt: skip


def _tune_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="show what a tune_file keeps; asks nobody"
    )
    _status_options(parser)


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    _json(parser)
    parser.add_argument(
        "--timeout",
        type=_typed(seconds()),
        default=5.0,
        metavar="SECONDS",
        help="for each look at another host (default 5)",
    )
    _settings_options(parser, ("coordinator", "bind", *_TUNING, *_WORKER))  # fmt: skip


def _bench_options(parser: argparse.ArgumentParser) -> None:
    from gradsum.deploy.bench import add_arguments

    add_arguments(parser)


def _plan_options(parser: argparse.ArgumentParser) -> None:
    from gradsum.deploy.plan import add_arguments

    add_arguments(parser)


def _trace_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=["merge"], help="merge: make one timeline, on one clock, for Perfetto")
    add("folder", type=Path, metavar="DIR", help="the folder that GRADSUM_TRACE named")
    add("--out", type=Path, metavar="FILE", help="where to write (default DIR/timeline.json)")
    _json(parser)


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "coordinator": ("Run the coordinator of a service.", _coordinator_options),
    "server": ("Run summation servers that join a coordinator.", _server_options),
    "launch": ("Run a training script on several workers.", _launch_options),
    "status": ("Show what a running service does.", _status_options),
    "tune": ("Show what tuning has tried and found.", _tune_options),
    "doctor": ("Check this machine, the settings and the network.", _doctor_options),
    "bench": ("Measure how fast the service sums, with every sum checked.", _bench_options),
    "plan": ("Say how many CPU machines a job should add.", _plan_options),
    "trace": ("Merge timelines that GRADSUM_TRACE has written.", _trace_options),
    "version": ("Show gradsum's version.", _json),
}
