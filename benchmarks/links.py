"""A lab of network namespaces: machines with links of a chosen rate, all on this one.

Every node has a namespace with one interface; a bridge joins them. Its link is shaped in both
directions by token buckets: at the node's interface, and at the bridge's side of it. Rules: names
carry the pid of the lab, so that what a killed run left is found and removed; whatever happens, the
lab is gone when the block ends. Needs root and the tools ``ip`` and ``tc``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

PREFIX: Final = "gsl"
_HZ: Final = 250
_SEGMENT: Final = 64 << 10  # the largest packet that a sender hands to its interface
_QUEUE_MS: Final = 50
_WITHIN: Final = 20.0
_BUFFERS: Final = {
    "net.ipv4.tcp_wmem": "4096 65536 524288",
    "net.ipv4.tcp_rmem": "4096 131072 2097152",
    "net.ipv4.tcp_notsent_lowat": "131072",
    "net.ipv4.tcp_limit_output_bytes": "262144",
}


class Unavailable(Exception):
    """This machine, or this user, cannot have a lab; the text says why."""


class Counters(NamedTuple):
    """Bytes at a node's interface, and packets that its two buckets dropped."""

    received: int
    sent: int
    dropped: int


def require() -> None:
    """Unavailable unless namespaces can be made here."""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            raise Unavailable(f"the tool {tool!r} is not installed")


def run(*words: str, check: bool = True) -> str:
    """Output of a command; CalledProcessError when it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=_WITHIN)
    if check and done.returncode:
        raise Unavailable(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def burst(mbit: float) -> int:
    """Bytes of a bucket: what the rate brings between two ticks of the kernel, twice."""
    return max(int(2 * mbit * 1e6 / 8 / _HZ), 2 * _SEGMENT)


class Lab:
    """Nodes by name, each with an address and a link of ``mbit`` Mbit/s in each direction."""

    def __init__(self, nodes: Sequence[str], mbit: float, congestion: str = "reno") -> None:
        require()
        self.nodes = list(nodes)
        self._tag = f"{PREFIX}{os.getpid()}"
        self._bridge = f"{self._tag}b"
        self._congestion = congestion
        self.mbit = mbit

    def __enter__(self) -> Lab:
        try:
            run("ip", "link", "add", self._bridge, "type", "bridge")
            run("ip", "link", "set", self._bridge, "up")
            for number, node in enumerate(self.nodes):
                self._add(number, node)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def space(self, node: str) -> str:
        """The name of a node's namespace."""
        return f"{self._tag}-{node}"

    def address(self, node: str) -> str:
        """Its IPv4 address."""
        return f"10.213.0.{self.nodes.index(node) + 1}"

    def _outside(self, node: str) -> str:
        return f"{self._tag}{self.nodes.index(node)}"

    def _add(self, number: int, node: str) -> None:
        space, outside = self.space(node), self._outside(node)
        run("ip", "netns", "add", space)
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "link", "set", outside, "master", self._bridge, "up")
        inside = ("ip", "-n", space)
        run(*inside, "addr", "add", f"10.213.0.{number + 1}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "link", "set", "lo", "up")
        settings = _BUFFERS | {"net.ipv4.tcp_congestion_control": self._congestion}
        words = [f"{name}={value}" for name, value in settings.items()]
        run("ip", "netns", "exec", space, "sysctl", "-qw", *words)
        self._shape("add", node, self.mbit)

    def _shape(self, verb: str, node: str, mbit: float) -> None:
        bucket = ["root", "tbf", "rate", f"{mbit}mbit", "burst", str(burst(mbit))]
        bucket += ["latency", f"{_QUEUE_MS}ms"]
        run("tc", "-n", self.space(node), "qdisc", verb, "dev", "eth0", *bucket)
        run("tc", "qdisc", verb, "dev", self._outside(node), *bucket)

    def set_rate(self, node: str, mbit: float) -> None:
        """Change a node's link, while it is in use if need be."""
        self._shape("replace", node, mbit)

    def command(self, node: str, words: Sequence[str]) -> list[str]:
        """``words`` as a process of a node, whose host name is the node's."""
        name = 'hostname "$0" && exec "$@"'
        entering = ["ip", "netns", "exec", self.space(node), "unshare", "--uts"]
        return [*entering, "sh", "-c", name, node, *words]

    def counters(self, node: str) -> Counters:
        """What has passed so far."""
        folder = Path("/sys/class/net", self._outside(node), "statistics")
        sent, received = (int((folder / f"{way}_bytes").read_text()) for way in ("rx", "tx"))
        shown = run("tc", "-s", "-n", self.space(node), "qdisc", "show", "dev", "eth0")
        shown += run("tc", "-s", "qdisc", "show", "dev", self._outside(node))
        drops = [part.split(",")[0] for part in shown.split("dropped ")[1:]]
        return Counters(received, sent, sum(map(int, drops)))

    def close(self) -> None:
        """Remove everything."""
        remove(self._tag)


def remove(tag: str) -> None:
    """Remove the namespaces and interfaces whose names begin with a tag."""
    for line in run("ip", "netns", "list").splitlines():
        if line.startswith(tag):
            run("ip", "netns", "delete", line.split()[0], check=False)
    for line in run("ip", "-o", "link", "show").splitlines():
        name = line.split(": ")[1].split("@")[0]
        if name.startswith(tag):
            run("ip", "link", "delete", name, check=False)


def remove_dead() -> list[str]:
    """Remove the labs of processes that have ended; their tags."""
    require()
    tags = set()
    for line in run("ip", "netns", "list").splitlines():
        tag = line.split("-")[0]
        pid = tag.removeprefix(PREFIX)
        if tag.startswith(PREFIX) and pid.isdigit() and not Path("/proc", pid).exists():
            tags.add(tag)
    for tag in tags:
        remove(tag)
    return sorted(tags)
