"""The coordinator's outgoing mail: members are addressed by rank, actions carry routing ids."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from gradsum.scheduler.events import Action, Junk, Log, Send
from gradsum.scheduler.membership import Member, Membership


class Post:
    """Collects the actions of one step. Members that have left or are lost get nothing."""

    __slots__ = ("_actions", "_members")

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """All actions since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def add(self, action: Action) -> None:
        """Any other action."""
        self._actions.append(action)

    def peer(self, peer: bytes, message: Any) -> None:
        """To a routing id, member or not."""
        self._actions.append(Send(peer, message))

    def worker(self, rank: int, message: Any) -> None:
        """To one worker."""
        self._present((self._members.workers[rank],), message)

    def workers(self, message: Any, but: Container[int] = ()) -> None:
        """To all workers, joined ones included."""
        self._present((m for r, m in self._members.workers.items() if r not in but), message)

    def servers(self, message: Any, but: Container[int] = ()) -> None:
        """To all servers."""
        self._present((m for r, m in self._members.servers.items() if r not in but), message)

    def log(self, level: str, text: str, key: str = "") -> None:
        """A line for the log; with a key, at a limited rate."""
        self._actions.append(Log(level, text, key))

    def junk(self, peer: bytes, text: str) -> None:
        """Something that nobody asked for."""
        self._actions.append(Junk(peer, text))

    def _present(self, members: Iterable[Member], message: Any) -> None:
        self._actions += [Send(m.peer, message) for m in members if m.present]
