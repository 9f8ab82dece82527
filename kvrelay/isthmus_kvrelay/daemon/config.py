"""The relay's settings, `ISTHMUS_RELAY_*`."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from isthmus_kvrelay.core.settings import RETARGET_WAIT_S, WORK_REQUESTS, RelaySettings
from isthmus_kvrelay.daemon.pool_memory import MemorySettings
from isthmus_kvrelay.daemon.relay_daemon import DaemonSettings
from isthmus_kvrelay.transports.choice import TransportKind, TransportSettings
from isthmus_kvrelay.transports.handshake import MAX_STREAMS, MIN_SECRET_CHARS
from isthmus_kvrelay.transports.tcp import TcpSettings
from isthmus_kvrelay.transports.tls import TlsSettings
from isthmus_kvrelay.transports.verbs.messages import MAX_RAILS
from isthmus_kvrelay.transports.verbs.transport import VerbsSettings
from isthmus_shared.config import ServiceConfig, secret_field
from isthmus_shared.ids import Incarnation, NodeId

MIB = 1 << 20
WILDCARDS = ("0.0.0.0", "::")  # compared with, never bound by default


class RelayConfig(ServiceConfig):
    PREFIX: ClassVar[str] = "RELAY"
    TRACES: ClassVar[bool] = False

    node_id: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="This node's name, the same for its workers")
    socket: Path = Field(
        description="Unix socket at which this node's workers find the relay",
        json_schema_extra={"allowed": "a path of at most 105 bytes"},
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="Where lanes from other relays are accepted")
    port: int = Field(default=0, ge=0, le=65535, description="Its TCP port; 0 takes a free one")
    advertise: str | None = Field(default=None, description="Host that other relays dial; default: `host`")
    secret: str = secret_field(
        ..., min_length=MIN_SECRET_CHARS, description=f"Shared by all relays, at least {MIN_SECRET_CHARS} characters"
    )
    pool_bytes: int = Field(default=256 * MIB, ge=2 * 4096, description="Staging pool of this node")
    prefault: bool = Field(default=True, description="Fill the pool's memory in at the start, in the background")
    huge_pages: bool = Field(default=False, description="The pool in huge pages, which the host must have reserved")
    numa_node: int | None = Field(default=None, ge=0, lt=1024, description="Node of the host to hold the pool")
    slot_bytes: int = Field(default=2 * MIB, ge=4096, le=64 * MIB, description="One slot, and so one chunk")
    out_share: float = Field(default=0.5, gt=0, lt=1, description="Largest part of the pool for outgoing transfers")
    retain_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Staging that transfers which are over may keep for a retry elsewhere, while nobody needs it; "
        "empty: a quarter of the out-share; 0: none",
    )
    client_share: float = Field(
        default=1.0, gt=0, le=1, description="Largest part of each direction's share that one worker may hold"
    )
    work_requests: int = Field(
        default=WORK_REQUESTS, ge=0, description="Chunks that a peer may have under way to this relay; 0: any number"
    )
    host_us_per_step: float = Field(
        default=5_000,
        ge=0,
        description="CPU microseconds that receiving may cost while a worker's engine makes one decode step; 0: any",
    )
    rate_bytes_per_s: float = Field(default=0, ge=0, description="Ceiling of one lane; 0 is none")
    retarget_wait_s: float = Field(
        default=RETARGET_WAIT_S,
        ge=0,
        le=3600,
        description="How long KV that is still being filled waits for another destination when its own was lost",
    )
    streams: int = Field(default=2, ge=1, le=MAX_STREAMS, description="TCP data streams of one lane")
    compiled: bool = Field(
        default=True, description="Move TCP lanes' bytes in loops that numba compiles, where numba is installed"
    )

    tls_cert: Path | None = Field(default=None, description="PEM certificate chain; makes TCP lanes TLS, both ways")
    tls_key: Path | None = Field(default=None, description="Its private key")
    tls_ca: Path | None = Field(default=None, description="PEM authorities whose certificates are other relays'")
    transport: TransportKind = Field(
        default=TransportKind.AUTO,
        description="What carries lanes; `auto`: RDMA verbs where both ends have it, else TCP",
    )
    devices: tuple[str, ...] = Field(
        default=(),
        max_length=MAX_RAILS,
        description="RDMA devices, one rail each, in the same order on every node; none: all that there are",
    )
    gid_index: int | None = Field(
        default=None, ge=0, lt=256, description="Address (GID) of every device; default: the best, RoCE v2 first"
    )

    @model_validator(mode="after")
    def _at_least_two_slots(self) -> RelayConfig:
        if self.pool_bytes < 2 * self.slot_bytes:
            raise ValueError("ISTHMUS_RELAY_POOL_BYTES must hold at least two slots of ISTHMUS_RELAY_SLOT_BYTES")
        return self

    @model_validator(mode="after")
    def _tls_whole(self) -> RelayConfig:
        if len({path is None for path in (self.tls_cert, self.tls_key, self.tls_ca)}) > 1:
            raise ValueError("ISTHMUS_RELAY_TLS_CERT, _KEY and _CA go together")
        return self

    @property
    def tls(self) -> TlsSettings | None:
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return TlsSettings(cert=self.tls_cert, key=self.tls_key, ca=self.tls_ca)

    def settings(self, incarnation: Incarnation) -> DaemonSettings:
        host = socket.gethostname() if self.host in WILDCARDS else self.host
        return DaemonSettings(
            node_id=NodeId(self.node_id),
            socket=self.socket,
            secret=self.secret.encode(),
            relay=RelaySettings(
                incarnation=incarnation,
                slot_bytes=self.slot_bytes,
                total_slots=self.pool_bytes // self.slot_bytes,
                out_share=self.out_share,
                rate_bytes_per_s=self.rate_bytes_per_s or math.inf,
                retain_bytes=self.retain_bytes,
                client_share=self.client_share,
                work_requests=self.work_requests or None,
                host_us_per_step=self.host_us_per_step,
                retarget_wait_s=self.retarget_wait_s,
            ),
            transport=TransportSettings(
                tcp=TcpSettings(
                    host=self.host,
                    port=self.port,
                    advertise=self.advertise or host,
                    streams=self.streams,
                    compiled=self.compiled,
                    tls=self.tls,
                ),
                kind=self.transport,
                verbs=VerbsSettings(devices=self.devices, gid_index=self.gid_index),
            ),
            memory=MemorySettings(prefault=self.prefault, huge_pages=self.huge_pages, numa_node=self.numa_node),
        )
