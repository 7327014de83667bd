"""Log lines: the standard library's logging, under the one logger ``gradsum``, to stderr.

Rules: nothing is configured on import; ``setup`` is called at the edge, and again once the rank is
known. A prefix such as ``[w3]`` says who speaks. What a stranger or a slow peer can
cause is logged through RateLimited, so that it cannot fill a disk.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

ROOT = "gradsum"


class TextFormatter(logging.Formatter):
    """``[w3] 12:00:01.250 WARNING worker.session: text``"""

    def __init__(self, prefix: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self.prefix = f"{prefix} " if prefix else ""

    def format(self, record: logging.LogRecord) -> str:
        moment = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}"
        name = record.name.removeprefix(ROOT + ".")
        text = f"{self.prefix}{moment} {record.levelname} {name}: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (seconds since 1970), level, who, name, text, error."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.who = prefix.strip("[]")

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname,
            "who": self.who,
            "name": record.name,
            "text": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _Stderr(logging.StreamHandler[TextIO]):
    """Looks sys.stderr up at each line: the program may have replaced it since."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def setup(level: str, fmt: str, prefix: str) -> logging.Logger:
    """The ``gradsum`` logger with this one handler. The root logger is left alone."""
    logger = logging.getLogger(ROOT)
    handler = _Stderr()
    handler.setFormatter(JsonFormatter(prefix) if fmt == "json" else TextFormatter(prefix))
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
    return logger


class RateLimited:
    """At most one line per ``interval`` seconds and key; the next one says how many were held."""

    def __init__(
        self,
        logger: logging.Logger,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval = interval
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}  # key -> (time of the last line, held since)

    def log(self, level: int, key: str, text: str, *args: object) -> bool:
        """Log ``text % args`` unless its key had a line just now; True if it was logged."""
        now = self._clock()
        last, held = self._seen.get(key, (-self._interval, 0))
        if now - last < self._interval:
            self._seen[key] = (last, held + 1)
            return False
        self._forget(now)
        self._seen[key] = (now, 0)
        if held:
            text, args = text + " (and %d more like it)", (*args, held)
        self._logger.log(level, text, *args)
        return True

    def _forget(self, now: float) -> None:
        """Keys may come from strangers: those that fell silent are dropped."""
        if len(self._seen) > 256:
            self._seen = {k: v for k, v in self._seen.items() if now - v[0] < self._interval}
