"""What the rank programs of benchmarks/ have in common: how they are started, and what they say."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def arguments(description: str | None) -> argparse.ArgumentParser:
    """With the arguments that benchmarks/place.py gives to all of them."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--warmup", type=int, required=True, help="steps that do not count")
    found.add_argument("--steps", type=int, required=True, help="steps after them")
    found.add_argument("--result", type=Path, required=True, metavar="FILE", help="what is found")
    return found


def publish(file: Path, result: dict[str, Any]) -> None:
    """Rank 0 writes what it has found."""
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps({"usage": {}} | result), encoding="utf-8")
