"""The file that keeps what tuning found, for the coordinator process.

Rules: the file is written as a whole beside its place and renamed, so a reader never sees half of
it. What cannot be read or written is a warning that names it, never the end of a job.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from gradsum.scheduler.record import Record, dump, parse

_LOG = logging.getLogger("gradsum.coordinator")


class TuneFile:
    """The records of ``path`` as they were at the start, and those learnt since."""

    __slots__ = ("_path", "records")

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records: dict[str, Record] = {}
        try:
            self.records = parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            _LOG.info("tune_file %s is new", path)
        except (OSError, ValueError) as error:
            _LOG.warning("tune_file %s is ignored: %s; remove it, or mend it", path, error)

    def keep(self, record: Record) -> None:
        """Add a record and write the file."""
        self.records[record.fingerprint] = record
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            new.write_text(dump(self.records), encoding="utf-8")
            new.replace(self._path)
        except OSError as error:
            new.unlink(missing_ok=True)
            _LOG.warning("tune_file %s cannot be written: %s", self._path, error)
