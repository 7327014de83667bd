"""The one membership of this process, which the functions of the public face are bound to.

Rules: this is the only module state of the front end; a script that dies of an exception is
reported as failed, never as a clean leave.
"""

from __future__ import annotations

import atexit
import sys
from contextlib import suppress
from types import TracebackType
from typing import Final

from gradsum import config, log
from gradsum.errors import GradsumError, UsageError
from gradsum.worker.client import Client
from gradsum.worker.face import Session


class Default:
    """This process's membership, and what was done to the interpreter for it."""

    def __init__(self) -> None:
        self.client: Client | None = None
        self.settings: config.Settings | None = None
        self._hooked = False

    def open(self, settings: config.Settings) -> None:
        """Become a member. The same settings again change nothing."""
        if self.client is not None and not self.client.session.closed:
            self.client.session.check()
            if settings != self.settings:
                raise UsageError(
                    "already initialised with other settings", hint="call gradsum.shutdown() first"
                )
            return
        log.setup(settings.log_level, settings.log_format, f"[w{settings.rank or 0}]")
        session = _session(settings)
        log.setup(settings.log_level, settings.log_format, f"[w{session.rank}]")
        self.client, self.settings = Client(session), settings
        if not self._hooked:
            self._hooked = True
            atexit.register(self.close)
            previous = sys.excepthook

            def failed(
                kind: type[BaseException], error: BaseException, trace: TracebackType | None
            ) -> None:
                if self.client is not None and not issubclass(kind, SystemExit):
                    self.client.session.abort(f"{kind.__name__}: {error}")
                previous(kind, error, trace)

            sys.excepthook = failed

    def get(self) -> Client:
        """The membership; UsageError without one."""
        if self.client is None:
            raise UsageError("not initialised: call gradsum.init()")
        return self.client

    def close(self) -> None:
        """Leave; nothing if there is nothing to leave."""
        if self.client is not None:
            client, self.client = self.client, None
            with suppress(GradsumError):  # a failed job has told so already
                client.settle()
            client.session.close()


def _session(settings: config.Settings) -> Session:
    if settings.coordinator is None and (settings.world_size or 1) == 1:
        from gradsum.worker.local import LocalSession

        return LocalSession(settings)
    from gradsum.worker.session import Session as Networked
    from gradsum.worker.timeline import write_on_sigterm

    settings.require("coordinator", "rank", "world_size")
    session = Networked.open(settings)
    if session.timeline is not None:
        write_on_sigterm(session.timeline.trace)
    return session


default: Final = Default()
