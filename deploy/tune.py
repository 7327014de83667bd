"""``gradsum tune``: what tuning has tried, what it made of that, and what a tune_file keeps.

Rules: the coordinator answers with its status; nothing is changed. Without tuning there is nothing
to show, which is an error with its remedy and exit code 2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradsum.config import Settings
from gradsum.deploy.status import amount, ask, columns
from gradsum.errors import ConfigError, UsageError
from gradsum.scheduler.record import Record, dump, parse


def run(settings: Settings, timeout: float, *, as_json: bool) -> int:
    """Ask, print, return 0. Raises Unreachable; UsageError when the coordinator does not tune."""
    status = ask(settings.coordinator or "", timeout)
    if not status.get("tunes"):
        raise UsageError(
            "tuning is off",
            hint="start the coordinator, or launch --standalone, with --tune or GRADSUM_TUNE=1",
        )
    picture = status.get("tune") or {"state": "no job", "current": None, "best": None, "points": []}
    print(json.dumps(picture, indent=2) if as_json else "\n".join(describe(picture)))
    return 0


def show(path: Path, *, as_json: bool) -> int:
    """Print what a tune_file keeps. Raises ConfigError for a file that cannot be used."""
    try:
        records = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="see --file") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", hint="is it a tune_file of this release?") from None
    print(dump(records).rstrip() if as_json else "\n".join(_kept(records)))
    return 0


def describe(picture: Mapping[str, Any]) -> Iterator[str]:
    """The lines that people read: the fastest first."""
    yield f"state    {picture['state']}"
    for name in ("current", "best"):
        if picture[name]:
            yield f"{name:<8} {_text(picture[name])}"
    points = sorted(picture["points"], key=lambda point: point["seconds"])
    if points:
        yield ""
        yield from columns(
            ("slice", "window", "pack", "step ms", "steps", "predicted ms", "deviation"),
            [
                (amount(p["slice_bytes"]), p["window"], amount(p["pack_bytes"]),
                 f"{p['seconds'] * 1e3:.2f}", p["steps"], f"{p['predicted'] * 1e3:.2f}",
                 f"{p['deviation'] * 1e3:.2f}")
                for p in points
            ],
        )  # fmt: skip


def _text(setting: Mapping[str, int]) -> str:
    size, pack = amount(setting["slice_bytes"]), amount(setting["pack_bytes"])
    return f"slices of {size}, {setting['window']} under way, {pack} packed"


def _kept(records: Mapping[str, Record]) -> Iterator[str]:
    yield from columns(
        ("job", "slice", "window", "pack", "step ms", "state", "tried"),
        [
            (key, amount(r.setting.slice_bytes), r.setting.window, amount(r.setting.pack_bytes),
             f"{r.seconds * 1e3:.2f}", r.state, r.points)
            for key, r in records.items()
        ],
    )  # fmt: skip
