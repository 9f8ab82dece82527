"""What the transport needs of RDMA verbs, and no more; `pyverbs_binding` and `ibverbs_binding` provide it.

A call that the library or the kernel refuses raises `OSError` with its errno. Nothing here blocks, registering memory
apart (it pins every page). Everything must be closed by its owner: queue pairs and regions before their device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from typing import Protocol, cast

from isthmus_shared.errors import ConfigInvalid

PORT = 1
"""Physical port of a device: adapters with two of them show up as two devices."""
MAX_POLL = 64
"""Completions taken from a queue in one call."""


class Status(IntEnum):
    """`ibv_wc_status`: how a work request ended."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23


@dataclass(frozen=True, slots=True)
class PortFacts:
    active: bool
    mtu: int
    """Active MTU as `ibv_mtu` has it: 1 … 5 for 256 … 4096 bytes."""
    lid: int
    ethernet: bool

    @property
    def mtu_bytes(self) -> int:
        return 128 << self.mtu


@dataclass(frozen=True, slots=True)
class QpAddress:
    """What a peer must know to connect its queue pair to this one."""

    number: int
    psn: int
    gid: bytes
    lid: int
    mtu: int


@dataclass(frozen=True, slots=True)
class PathSettings:
    """Patience of a reliable connection; the units are the InfiniBand specification's exponents."""

    timeout: int = 14
    """4.096 µs · 2^14 ≈ 67 ms, and a dead peer is an error after about (retries + 1) times that: 0.5 s."""
    retries: int = 6
    """Not 7, which some devices take for "for ever"."""
    rnr_retries: int = 6
    """Not 7, which is for ever. Receive credits keep a sound peer from ever needing one."""
    rnr_timer: int = 16
    """2.56 ms between two of them."""


@dataclass(frozen=True, slots=True)
class Depths:
    """Work requests that fit into a queue pair."""

    send: int
    receive: int


@dataclass(frozen=True, slots=True)
class Write:
    """One RDMA WRITE; with `imm` (32 bits) it takes one of the peer's receives and completes there too."""

    wr_id: int
    local_address: int
    size_bytes: int
    lkey: int
    remote_address: int
    rkey: int
    imm: int | None = None
    signaled: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    wr_id: int
    status: Status
    imm: int | None = None
    """Of a write that has landed here; None for a request of our own."""
    of_receive: bool = False
    """A receive ended (landed, or flushed). The opcode of a failed request is undefined: told by `wr_id`."""


RECEIVE_ID = 2**63
"""`wr_id` of every receive; those of writes are smaller."""


class Region(Protocol):
    """Registered memory. `close` ends every access to it."""

    @property
    def lkey(self) -> int: ...

    @property
    def rkey(self) -> int: ...

    def close(self) -> None: ...


class QueuePair(Protocol):
    """A reliable connection with a completion queue and channel of its own."""

    @property
    def number(self) -> int: ...

    @property
    def fd(self) -> int:
        """Readable when `completions` has something; non-blocking."""
        ...

    def connect(self, peer: QpAddress, *, psn: int, gid_index: int, mtu: int, path: PathSettings) -> None:
        """From reset to ready to send. Receives may be posted before it too (after `prepare`)."""
        ...

    def prepare(self) -> None:
        """From reset to initialised: receives may be posted."""
        ...

    def post_receives(self, count: int) -> None:
        """`count` receives that take no bytes: the payload goes where the write says."""
        ...

    def post_writes(self, writes: Sequence[Write]) -> None:
        """One chain, one doorbell. When it raises, some may have been posted: give the queue pair up."""
        ...

    def completions(self) -> list[Completion]:
        """Take the event if there is one, re-arm, then drain; never blocks."""
        ...

    def close(self) -> None:
        """Neither end's writes go through this queue pair any more when it returns. Idempotent."""
        ...


class Device(Protocol):
    @property
    def name(self) -> str: ...

    def port(self) -> PortFacts: ...

    def register(self, address: int, size_bytes: int, *, remote_write: bool) -> Region: ...

    def queue_pair(self, depths: Depths, receive_into: Region, receive_address: int) -> QueuePair:
        """`receive_into`, `receive_address`: any registered memory, for libraries that want an address."""
        ...

    def close(self) -> None: ...


class Binding(Protocol):
    name: str
    version: str

    def devices(self) -> list[str]:
        """Names; `OSError` (ENOSYS) where the kernel has no RDMA."""
        ...

    def open(self, device: str) -> Device: ...


BINDINGS = ("pyverbs", "ibverbs")
"""In order of preference: rdma-core's own first; the wheel where only pip is at hand."""


def load_binding(names: Sequence[str] = BINDINGS) -> Binding:
    """The first of `names` that can be had here; `ConfigInvalid` says why each could not."""
    reasons = []
    for name in names:
        try:
            module = import_module(f"isthmus_kvrelay.transports.verbs.{name}_binding")
        except ImportError as error:
            reasons.append(f"{name}: {error}")
        else:
            return cast(Binding, module.make())
    raise ConfigInvalid(
        "no RDMA verbs library can be loaded",
        why="; ".join(reasons),
        todo="apt install ibverbs-providers python3-pyverbs, or apt install ibverbs-providers and "
        "pip install 'isthmus[rdma]'",
    )
