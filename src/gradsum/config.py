"""Settings: one frozen object, made once at the edge (command line or ``init``) and passed down.

Rules: nobody below the edge reads the environment. A value comes from, in this order, a flag, its
GRADSUM_ variable, the launcher's variable for it (torchrun, Slurm, Kubernetes), the TOML file, the
default; and it knows which of them it was. An empty variable counts as not set. A value that cannot
be used is a ConfigError that names where it came from, the value and what is allowed; nothing is
clamped or guessed in silence.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from gradsum.errors import ConfigError
from gradsum.values import (
    ADDRESS,
    FLAG,
    FOLDER,
    TEXT,
    Kind,
    automatic,
    choice,
    count,
    seconds,
    size,
)

CONFIG_FILE = "gradsum.toml"
CONFIG_VARIABLE = "GRADSUM_CONFIG"
MIB = 1 << 20


class Option(NamedTuple):
    """One row of the table: a setting's name, how its text is read, and where it may come from."""

    name: str
    kind: Kind
    doc: str
    also: tuple[str, ...]  # variables of other launchers, in order of precedence
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "GRADSUM_" + self.name.upper()


def _option(default: Any, kind: Kind, doc: str, *also: str) -> Any:
    return field(default=default, metadata={"kind": kind, "doc": doc, "also": also})


_RANK = ("RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting of every process. Sizes are bytes, times are seconds."""

    coordinator: str | None = _option(None, ADDRESS, "the coordinator to join, HOST:PORT")
    job: str = _option(
        "default",
        TEXT,
        "name of the job; another one meanwhile is refused",
        "TORCHELASTIC_RUN_ID",
        "SLURM_JOB_ID",
    )
    rank: int | None = _option(None, count(0), "this worker's rank", *_RANK)
    world_size: int | None = _option(
        None, count(1), "workers of the job", "WORLD_SIZE", "SLURM_NTASKS"
    )
    local_rank: int = _option(0, count(0), "rank on this host", "LOCAL_RANK", "SLURM_LOCALID")
    local_size: int = _option(
        1, count(1), "workers on this host", "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"
    )
    restart_count: int = _option(
        0, count(0), "restarts by the launcher, information only", "TORCHELASTIC_RESTART_COUNT"
    )
    bind: str = _option("127.0.0.1", TEXT, "address to listen on")
    advertise: str | None = _option(None, TEXT, "address that others use, if not the bound one")
    insecure: bool = _option(False, FLAG, "listen beyond loopback without authentication")
    transport: str = _option(
        "auto",
        choice("auto", "tcp", "shm"),
        "auto: shared memory with servers of this host, TCP with others; shm: an error with others",
    )
    schedule: str = _option(
        "gradsum",
        choice("gradsum", "fifo", "p3", "bytescheduler"),
        "who travels next; the others are there to be measured against",
    )
    share_gradients: bool = _option(
        False, FLAG, "DistributedOptimizer keeps gradients in shared memory: nothing is copied in"
    )
    slice_bytes: int | None = _option(
        None,
        automatic(size(1)),
        "tensors are cut in slices of this size, rounded to whole elements, at most 64 MiB; "
        "auto: what the slowest link carries in 2.5 ms, measured while the job runs",
    )
    credit_bytes: int | None = _option(
        None,
        automatic(size(1)),
        "what a receiver lets one sender have under way; one slice always passes; auto: 8 slices",
    )
    skew_bytes: int | None = _option(
        None,
        automatic(size(1)),
        "how far a worker may run ahead of the slowest; auto: 4 slices",
    )
    pack_bytes: int = _option(MIB, size(0), "small tensors share buffers of this size; 0: never")
    tune: bool = _option(
        False, FLAG, "search the fastest slices, credit window and packing while the job runs"
    )
    tune_file: str | None = _option(
        None, TEXT, "JSON file of the coordinator: what tuning found, tried first the next time"
    )
    park_bytes: int = _option(256 * MIB, size(0), "memory for frames whose turn has not come")
    deterministic: bool = _option(False, FLAG, "add in rank order: the same bits on every run")
    nan_guard: bool = _option(False, FLAG, "raise when a gradient is not finite, naming it")
    heartbeat: float = _option(0.5, seconds(), "between two signs of life")
    suspect: float = _option(2.0, seconds(), "silence until a member is suspected")
    lease: float = _option(10.0, seconds(), "silence until a member is evicted")
    connect_timeout: float = _option(30.0, seconds(), "to reach the coordinator or a server")
    start_timeout: float = _option(300.0, seconds(), "until all members of the job have joined")
    stall_warning: float = _option(5.0, seconds(), "waiting for others until a warning says whom")
    stall_timeout: float = _option(1800.0, seconds(), "waiting for others until an error")
    request_timeout: float = _option(60.0, seconds(), "for an answer of the coordinator")
    shutdown_timeout: float = _option(10.0, seconds(), "to leave in order")
    max_tensors: int = _option(1_000_000, count(1), "tensors that one job may register")
    max_job_bytes: int = _option(0, size(0), "memory of one job on a server; 0: three quarters")
    log_level: str = _option(
        "INFO", choice("DEBUG", "INFO", "WARNING", "ERROR"), "least severe message that is logged"
    )
    log_format: str = _option("text", choice("text", "json"), "of the log")
    trace: str | None = _option(
        None, FOLDER, "each worker and server writes its timeline there; see gradsum trace merge"
    )
    origins: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)
    unknown: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """GRADSUM_ variables that mean nothing here: most likely misspelt."""

    def origin(self, name: str) -> str:
        """Where the value came from: ``flag --slice-bytes``, ``RANK``, ``gradsum.toml``, ..."""
        return dict(self.origins).get(name, "default")

    def table(self) -> list[tuple[str, Any, str, str]]:
        """(name, value, origin, doc) of every setting."""
        return [(o.name, getattr(self, o.name), self.origin(o.name), o.doc) for o in options()]

    def require(self, *names: str) -> None:
        """ConfigError that lists, all at once, those of the settings that nobody has set."""
        missing = [o for o in options() if o.name in names and getattr(self, o.name) is None]
        if missing:
            ways = "; ".join(
                f"{o.name}: {o.flag} or {', '.join((o.variable, *o.also))}" for o in missing
            )
            raise ConfigError(
                f"not set: {', '.join(o.name for o in missing)}", hint=f"set them ({ways})"
            )


def options() -> Iterator[Option]:
    """The table's rows, in the order of the fields."""
    for entry in fields(Settings):
        if "kind" in entry.metadata:
            meta = entry.metadata
            yield Option(entry.name, meta["kind"], meta["doc"], meta["also"], entry.default)


def load(flags: Mapping[str, Any], env: Mapping[str, str], file: Path | None = None) -> Settings:
    """Settings from flags (None: not given), variables and the TOML file.

    Without ``file``: the flag ``config``, GRADSUM_CONFIG, else ./gradsum.toml if there is one.
    Raises ConfigError.
    """
    path = file or _find_file(flags, env)
    table = _read_file(path) if path else {}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for option in options():
        found = next(_candidates(option, flags, env, table, path), None)
        if found is not None:
            origins[option.name] = found[0]
            values[option.name] = _parse(option, *found)
    settings = Settings(**values, origins=tuple(origins.items()), unknown=_unknown(env))
    _check_together(settings)
    return settings


def suggestion(name: str) -> str | None:
    """The GRADSUM_ variable that a misspelt one most likely means."""
    close = difflib.get_close_matches(name, [o.variable for o in options()], n=1, cutoff=0.8)
    return close[0] if close else None


def _candidates(
    option: Option,
    flags: Mapping[str, Any],
    env: Mapping[str, str],
    table: Mapping[str, Any],
    path: Path | None,
) -> Iterator[tuple[str, Any]]:
    """(origin, raw value) wherever the option is set, best first."""
    if flags.get(option.name) is not None:
        yield f"flag {option.flag}", flags[option.name]
    for variable in (option.variable, *option.also):
        # torchrun without a rendezvous id says "none": every such job would have one name.
        if env.get(variable) and (variable, env[variable]) != ("TORCHELASTIC_RUN_ID", "none"):
            yield variable, env[variable]
    if option.name in table and path:
        yield path.name, table[option.name]


def _parse(option: Option, origin: str, raw: Any) -> Any:
    try:
        return option.kind.read(raw)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(
            f"{option.name} cannot be {raw!r} (from {origin})",
            hint=f"{option.name} is {option.kind.allowed}",
        ) from None


def _find_file(flags: Mapping[str, Any], env: Mapping[str, str]) -> Path | None:
    named = flags.get("config") or env.get(CONFIG_VARIABLE)
    if named:
        return Path(named)
    return Path(CONFIG_FILE) if Path(CONFIG_FILE).is_file() else None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint=f"see --config and {CONFIG_VARIABLE}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", hint="such as: lease = 10.0") from None
    require_known(table, f"{path}: ")
    return table


def require_known(settings: Iterable[str], where: str = "") -> None:
    """ConfigError for a name that is no setting, with the one that was most likely meant."""
    names = [o.name for o in options()]
    for key in settings:
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {close[0]}?" if close else "gradsum doctor lists all settings"
            raise ConfigError(f"{where}there is no setting {key!r}", hint=hint)


def _unknown(env: Mapping[str, str]) -> tuple[str, ...]:
    known = {CONFIG_VARIABLE, *(o.variable for o in options())}
    return tuple(sorted(v for v in env if v.startswith("GRADSUM_") and v not in known))


_ASCENDING = (("heartbeat", "suspect"), ("suspect", "lease"), ("stall_warning", "stall_timeout"))


def _check_together(settings: Settings) -> None:
    """Values that are each allowed but contradict one another."""

    def name(key: str) -> str:
        return f"{key} {getattr(settings, key)} ({settings.origin(key)})"

    for low, high in _ASCENDING:
        if getattr(settings, low) >= getattr(settings, high):
            raise ConfigError(f"{name(low)} is not below {name(high)}", hint=f"raise {high}")
    for rank, total in (("rank", "world_size"), ("local_rank", "local_size")):
        value, limit = getattr(settings, rank), getattr(settings, total)
        given = settings.origin(rank) != "default" and settings.origin(total) != "default"
        if given and value >= limit:
            raise ConfigError(f"{name(rank)} is not below {name(total)}", hint="ranks start at 0")
