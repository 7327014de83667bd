"""How many bytes each server carries: the optimal split between co-located and CPU machines.

For n worker machines and k <= n further CPU machines with equal links, and D = n^2 + kn - 2k, a CPU
server carries 2(n-1)/D of the bytes and a co-located one (n-k)/D (BytePS, section 3). k = 0 is an
all-reduce and k = n a pure parameter server: points of one line, not modes. Beyond k = n the
co-located servers would only slow the machine they share, so they carry nothing.

With unequal links of B_h bytes/s the same argument gives each machine what its link carries in one
time T for all: a CPU machine n copies of its part, T*B = n*w; a worker's machine what it pushes
elsewhere and n - 1 copies of its part, T*B = 1 + (n-2)*w. All parts are 1 together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


def weights(
    worker_hosts: Sequence[str], server_hosts: Sequence[str],
    rates: Mapping[str, float] | None = None,
) -> tuple[float, ...]:  # fmt: skip
    """The share of each server, in the order given; the shares sum to 1.

    A server on a worker's host is co-located, any other host is a CPU machine. Servers of one
    machine share its weight equally. rates: of the hosts' links, in any unit; None: all equal.
    """
    homes, extras = _machines(worker_hosts, server_hosts)
    given = rates or dict.fromkeys((*homes, *extras), 1.0)
    own, extra = shares([given[host] for host in homes], [given[host] for host in extras])
    parts = dict(zip((*homes, *extras), (*own, *extra), strict=True))
    shards = Counter(server_hosts)
    raw = [parts[host] / shards[host] for host in server_hosts]
    total = sum(raw)
    if total <= 0:
        return tuple(1.0 / len(server_hosts) for _ in server_hosts)
    return tuple(weight / total for weight in raw)


def slowest(
    worker_hosts: Sequence[str], server_hosts: Sequence[str], rates: Mapping[str, float],
    parts: Sequence[float],
) -> float:  # fmt: skip
    """Seconds that the slowest link takes for one byte of every worker; parts: of the servers, in
    the order given; rates: of the hosts' links, bytes/s."""
    homes, extras = _machines(worker_hosts, server_hosts)
    carried = dict.fromkeys((*homes, *extras), 0.0)
    for host, part in zip(server_hosts, parts, strict=True):
        carried[host] += part
    return seconds(
        [rates[host] for host in homes], [rates[host] for host in extras], list(carried.values())
    )


def _machines(
    worker_hosts: Sequence[str], server_hosts: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The machines of workers, and the CPU machines, each once."""
    homes = list(dict.fromkeys(worker_hosts))
    return homes, [host for host in dict.fromkeys(server_hosts) if host not in homes]


def shares(
    workers: Sequence[float], extras: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Parts of the co-located servers and of the CPU machines, from the rates of their links."""
    n = len(workers)
    if n == 1:
        own, extra = [float(not extras)], list(extras)
    else:
        time = _time(workers, extras)
        extra = [time * rate / n for rate in extras]
        if n == 2:  # its own pushes and the other's copy: a worker's load is the same by any part
            own = [max(1 - sum(extra), 0.0) * rate / sum(workers) for rate in workers]
        else:
            own = [max(time * rate - 1, 0.0) / (n - 2) for rate in workers]
    whole = sum(own) + sum(extra)
    return tuple(part / whole for part in own), tuple(part / whole for part in extra)


def _time(workers: Sequence[float], extras: Sequence[float]) -> float:
    """Of one byte from every worker, at best."""
    n, floor = len(workers), 1 / min(workers)  # every worker's own pushes
    if n == 2:
        return floor
    parts = sum(extras) / n + sum(workers) / (n - 2)
    return max((1 + n / (n - 2)) / parts, floor)


def seconds(workers: Sequence[float], extras: Sequence[float], parts: Sequence[float]) -> float:
    """Of one byte from every worker, with these parts of its servers (co-located ones first)."""
    n = len(workers)
    own, extra = parts[:n], parts[n:]
    loads = [(1 + (n - 2) * part) / rate for part, rate in zip(own, workers, strict=True)]
    loads += [n * part / rate for part, rate in zip(extra, extras, strict=True)]
    return max(loads)
