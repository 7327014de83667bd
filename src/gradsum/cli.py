"""The ``gradsum`` command: one small function a command.

Rules: each command imports only what it runs; whatever gradsum raises becomes a message with its
remedy, never a traceback. Exit codes: 0 ok, 1 job failed, 2 usage or configuration, 3 coordinator
unreachable, 4 peer lost, 130 interrupted; ``launch`` gives the failing child's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from gradsum import log
from gradsum.arguments import DEFAULT_PORT, parse
from gradsum.config import CONFIG_VARIABLE, Settings, load, options, suggestion
from gradsum.errors import (
    ConfigError,
    GradsumError,
    NotBuilt,
    PeerLost,
    Unreachable,
    UsageError,
)
from gradsum.proto.address import Address, parse_address
from gradsum.trace import require_writable

_EXIT_CODES: tuple[tuple[type[GradsumError], int], ...] = (
    (ConfigError, 2),
    (UsageError, 2),
    (NotBuilt, 2),
    (Unreachable, 3),
    (PeerLost, 4),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of ``argv`` (default: the process's own); returns the exit code."""
    words, after_dashes = _split(list(sys.argv[1:] if argv is None else argv))
    args = parse(words)
    if after_dashes:  # a -- after the script is the script's own
        args.words += ["--", *after_dashes] if args.words else after_dashes
    try:
        return _COMMANDS[args.command](args)
    except GradsumError as error:
        print(f"gradsum: {error}", file=sys.stderr)
        return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)
    except KeyboardInterrupt:
        return 130


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """For ``launch``: our own words, and what comes after the first ``--``."""
    if words[:1] == ["launch"] and "--" in words:
        cut = words.index("--")
        return words[:cut], words[cut + 1 :]
    return words, []


def _load(args: argparse.Namespace, **more: object) -> Settings:
    return load(vars(args) | more, os.environ)


def _start_log(settings: Settings, prefix: str) -> None:
    logger = log.setup(settings.log_level, settings.log_format, prefix)
    for name in settings.unknown:
        meant = suggestion(name)
        logger.warning("%s means nothing%s", name, f"; did you mean {meant}?" if meant else "")


def _coordinator(args: argparse.Namespace) -> int:
    where = parse_address(args.bind, "--bind") if args.bind else None
    settings = _load(args, bind=where.host if where else None)
    where = where or Address(settings.bind, DEFAULT_PORT)
    _start_log(settings, "[coordinator]")
    from gradsum.scheduler.coordinator import run

    return run(
        settings, where.host, where.port, args.workers, args.servers, args.once, args.port_file
    )


def _server(args: argparse.Namespace) -> int:
    settings = _load(args)
    settings.require("coordinator")
    _start_log(settings, "[server]")
    from gradsum.server.daemon import run

    return run(settings, args.shards, args.once, args.port_file)


def _launch(args: argparse.Namespace) -> int:
    from gradsum.deploy.command import resolve
    from gradsum.deploy.launch import Launch, run
    from gradsum.deploy.ranks import layout, without_ranks

    if args.standalone and args.coordinator:
        raise ConfigError(
            "--standalone starts a coordinator of its own", hint="leave out --coordinator"
        )
    if args.servers and not args.standalone:
        raise ConfigError("--servers belongs to --standalone", hint="add --standalone")
    command = resolve(args.words, module=args.module, no_python=args.no_python)
    where = layout(args.nproc_per_node, args.nnodes, args.node_rank, os.environ)
    if args.standalone and where.launchers > 1:
        raise ConfigError(
            f"--standalone is for one launcher, not {where.launchers}",
            hint="run gradsum coordinator and gradsum server, and launch with --coordinator",
        )
    settings = load(vars(args), without_ranks(os.environ))
    _start_log(settings, "[launch]")
    if settings.trace is not None:  # said here once, before every child says it
        require_writable(Path(settings.trace))
    return run(
        Launch(
            command=tuple(command),
            layout=where,
            env=os.environ | _exported(args),
            servers=(args.servers or 1) if args.standalone else 0,
            coordinator=None if args.standalone else settings.coordinator,
            job=settings.job,
            master_addr=args.master_addr,
            master_port=args.master_port,
            grace=args.grace,
            start_timeout=settings.connect_timeout,
            unknown=settings.unknown,
            verbose=args.verbose,
        )
    )


def _exported(args: argparse.Namespace) -> dict[str, str]:
    """The settings among the launcher's options, for its children."""
    given = {o.variable: getattr(args, o.name, None) for o in options()}
    found = {name: "1" if v is True else str(v) for name, v in given.items() if v is not None}
    if args.config:
        found[CONFIG_VARIABLE] = str(Path(args.config).absolute())
    return found


def _status(args: argparse.Namespace) -> int:
    settings = _load(args)
    settings.require("coordinator")
    from gradsum.deploy.status import run

    return run(settings, args.timeout, as_json=args.json)


def _tune(args: argparse.Namespace) -> int:
    from gradsum.deploy.tune import run, show

    if args.file is not None:
        return show(args.file, as_json=args.json)
    settings = _load(args)
    settings.require("coordinator")
    return run(settings, args.timeout, as_json=args.json)


def _doctor(args: argparse.Namespace) -> int:
    from gradsum.deploy.doctor import run

    return run(_load(args), args.timeout, as_json=args.json)


def _bench(args: argparse.Namespace) -> int:
    from gradsum.deploy.bench import run

    return run(args)


def _plan(args: argparse.Namespace) -> int:
    from gradsum.deploy.plan import run

    return run(args)


def _trace(args: argparse.Namespace) -> int:
    from gradsum.deploy.trace import merge

    return merge(args.folder, args.out, as_json=args.json)


def _version(args: argparse.Namespace) -> int:
    version = importlib.metadata.version("gradsum")
    print(json.dumps({"gradsum": version}) if args.json else f"gradsum {version}")
    return 0


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType(
    {
        "coordinator": _coordinator,
        "server": _server,
        "launch": _launch,
        "status": _status,
        "tune": _tune,
        "doctor": _doctor,
        "bench": _bench,
        "plan": _plan,
        "trace": _trace,
        "version": _version,
    }
)
