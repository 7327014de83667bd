"""How many bytes each server carries: the optimal split between co-located and CPU machines.

For n worker machines and k <= n further CPU machines with equal links, and D = n^2 + kn - 2k, a CPU
server carries 2(n-1)/D of the bytes and a co-located one (n-k)/D (BytePS, section 3). k = 0 is an
all-reduce and k = n a pure parameter server: points of one line, not modes. Beyond k = n the
co-located servers would only slow the machine they share, so they carry nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


def weights(worker_hosts: Iterable[str], server_hosts: Sequence[str]) -> tuple[float, ...]:
    """The share of each server, in the order given; the shares sum to 1.

    A server on a worker's host is co-located, any other host is a CPU machine. Servers of one
    machine share its weight equally.
    """
    homes = set(worker_hosts)
    shards = Counter(server_hosts)
    extra = len(shards.keys() - homes)
    colocated, cpu = split(len(homes), extra)
    raw = [(colocated if host in homes else cpu) / shards[host] for host in server_hosts]
    total = sum(raw)
    if total <= 0:
        return tuple(1.0 / len(server_hosts) for _ in server_hosts)
    return tuple(weight / total for weight in raw)


def split(machines: int, extra: int) -> tuple[float, float]:
    """Shares (co-located machine, CPU machine) for n worker machines and k CPU machines."""
    if extra > machines or (machines == 1 and extra):
        return 0.0, 1.0 / extra
    if machines <= 1:
        return 1.0, 0.0
    n, k = machines, extra
    whole = n * n + k * n - 2 * k
    return (n - k) / whole, 2 * (n - 1) / whole
