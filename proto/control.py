"""Messages between the coordinator and its members (workers and servers).

Rules: every request may be sent again (requests carry ``req``, everything else is idempotent),
since any message can be lost; what the coordinator announces is repeated by level in
HeartbeatReply, so a member that missed an announcement asks for it. Direction is said in each
docstring: up is towards the coordinator, down away from it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gradsum.proto.codec import Codec


class Hello(NamedTuple):
    """Up, first message of a member and again after each reconnect (then with its token)."""

    protocol: int
    role: str  # "worker" | "server"
    job: str
    rank: int | None  # worker: None lets the coordinator choose; server: None
    world: int | None  # worker: the size it was told; refused when it differs
    host: str
    pid: int
    restart: int  # the launcher's restart count, information only (I2)
    data: str  # server: tcp://host:port of its data socket, else ""
    control: str  # server: the same for its control socket, else ""
    token: bytes  # b"" at first
    home: str = ""  # where it could share memory, "" where it would not


class Welcome(NamedTuple):
    """Down: the answer to Hello. Rank is the server's index for a server (I2)."""

    coordinator: str  # id of this coordinator (E9)
    rank: int
    world: int
    incarnation: int
    token: bytes
    heartbeat: float  # seconds between heartbeats
    lease: float  # seconds of silence until eviction


class Refusal(NamedTuple):
    """Down: Hello is not accepted; the connection is of no further use."""

    message: str
    hint: str


class Waiting(NamedTuple):
    """Down, to those who wait, at the start or in a gather: who is missing."""

    text: str


class ServerInfo(NamedTuple):
    """One shard as the plan names it; weight is its share of the bytes, relative."""

    number: int
    incarnation: int
    data: str
    control: str
    weight: float


class PlanMessage(NamedTuple):
    """Down: the whole plan of an epoch, immutable."""

    coordinator: str
    job: str
    epoch: int
    members: tuple[tuple[int, int], ...]  # (rank, incarnation)
    servers: tuple[ServerInfo, ...]
    slice_bytes: int
    pack_bytes: int
    packing: tuple[int, ...]  # keys in ready order; () is no packing (E8)
    packed: int  # table length that the packing was made for
    fence: int  # number of the fence that opened this epoch, 0 for the first
    step: int  # step F of that fence
    versions: tuple[tuple[int, int], ...]  # (key, version at the fence) where all clocks start (V3)
    deterministic: bool
    tokens: tuple[tuple[int, bytes], ...]  # (rank, token); only in the copies for servers (I2)
    window: int = 0  # slices that a receiver lets one sender have under way; 0: its own settings


class PlanAck(NamedTuple):
    """Up, from servers: this epoch is in force here."""

    epoch: int


class FetchPlan(NamedTuple):
    """Up: send the current plan and the table from ``start`` on."""

    start: int


class TableMessage(NamedTuple):
    """Down: entries of the tensor table from ``start`` on; each is a TensorSpec as a tuple."""

    start: int
    specs: tuple[Any, ...]


class Register(NamedTuple):
    """Up: names that this rank will use. A non-empty group is compared as a set between ranks, once
    the part that is marked ``last`` is in: long lists come in several requests."""

    req: int
    group: str
    specs: tuple[Any, ...]
    last: bool = True


class Registered(NamedTuple):
    """Down: the keys, in the order of the request; the table reaches at least that far."""

    req: int
    keys: tuple[int, ...]


class Gather(NamedTuple):
    """Up: one value from every rank; ``turn`` counts the uses of the tag. Barrier: value b""."""

    req: int
    tag: str
    turn: int
    value: bytes


class Gathered(NamedTuple):
    """Down: all values by rank. Ranks that have joined (E7) are left out."""

    req: int
    values: dict[int, bytes]


class Failed(NamedTuple):
    """Down: ``req`` failed; req 0 with a tensor: all operations on that tensor; req 0 without one:
    the whole job. kind is the name of an error class."""

    req: int
    kind: str
    message: str
    peer: str
    tensor: str
    hint: str


class WindowReport(NamedTuple):
    """Up, once per optimizer after window 1: hook firings per key, keys in ready order (V4, E8)."""

    group: str
    counts: dict[int, int]
    order: tuple[int, ...]


class Firings(NamedTuple):
    """Down: the firings of all ranks merged."""

    group: str
    counts: dict[int, int]


class Heartbeat(NamedTuple):
    """Up: alive; where this member is. step counts fence points passed; active: epoch seconds since
    the training thread last called in (a warning only)."""

    token: bytes
    step: int
    epoch: int
    table: int
    digest: bytes
    idle: float
    info: dict[str, Any]  # counters for status: bytes, rounds, transport


class HeartbeatReply(NamedTuple):
    """Down: the level of everything that could have been missed."""

    epoch: int
    table: int
    fence: int  # open fence number, 0 for none
    left: tuple[int, ...]  # ranks that have left


class Fence(NamedTuple):
    """Down: at step F adopt what GO will bring (E1). ``epoch`` is the one it builds on."""

    number: int
    epoch: int
    step: int


class FenceAck(NamedTuple):
    """Up: ok when this worker's step is below F; else the coordinator makes a new fence."""

    number: int
    ok: bool
    step: int


class AtFence(NamedTuple):
    """Up: at F, what comes now waits for GO; the highest version submitted before, of every tensor
    that this rank has used."""

    number: int
    versions: dict[int, int]


class Consume(NamedTuple):
    """Down: all are at F, and what somebody has not submitted will not complete; consume the sums
    up to these versions."""

    number: int
    versions: dict[int, int]


class Consumed(NamedTuple):
    """Up: done. What this rank has pushed beyond will be pushed again under the new plan."""

    number: int


class Go(NamedTuple):
    """Down: the commit point; adopt the plan. The plan may equal the old one (fence aborted)."""

    number: int
    plan: PlanMessage


class Replan(NamedTuple):
    """Up, from an operator or the tuner: change these at the next fence; 0 keeps."""

    req: int
    slice_bytes: int
    pack_bytes: int


class Joined(NamedTuple):
    """Up: this rank has no more data (E7). Answered by Gathered when all ranks have joined:
    values {rank: b"last"} names the last one to join."""

    req: int


class Leave(NamedTuple):
    """Up: this member goes in peace, nothing depends on it (E6)."""

    reason: str


class Left(NamedTuple):
    """Down, also the answer to Leave: the rank is gone; rounds that miss it will not complete."""

    rank: int


class Abort(NamedTuple):
    """Up: this member ends by an error of its own; the text names it for the others."""

    message: str


class JobEnd(NamedTuple):
    """Down, to servers: the job is over; drop its state and take the next."""

    job: str
    failed: bool


class StatusQuery(NamedTuple):
    """Up, from anybody: what is going on."""

    req: int


class StatusReply(NamedTuple):
    """Down: a JSON-able description."""

    req: int
    status: dict[str, Any]


CONTROL = Codec(
    (
        Hello, Welcome, Refusal, Waiting, PlanMessage, PlanAck, FetchPlan, TableMessage,
        Register, Registered, Gather, Gathered, Failed, WindowReport, Firings,
        Heartbeat, HeartbeatReply, Fence, FenceAck, AtFence, Consume, Consumed, Go, Replan,
        Joined, Leave, Left, Abort, JobEnd, StatusQuery, StatusReply,
    )
)  # fmt: skip
