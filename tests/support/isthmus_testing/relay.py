"""Relay daemons in this process, and transfers between their clients."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from structlog.typing import FilteringBoundLogger

from isthmus_kvrelay.client import RelayClient
from isthmus_kvrelay.core.events import FlowClosed
from isthmus_kvrelay.core.ledger import RelaySettings
from isthmus_kvrelay.daemon.relay_daemon import DaemonSettings, RelayDaemon
from isthmus_kvrelay.transports.choice import TransportKind, TransportSettings
from isthmus_kvrelay.transports.tcp import TcpSettings
from isthmus_kvrelay.transports.verbs.binding import Binding, load_binding
from isthmus_kvrelay.transports.verbs.transport import VerbsSettings
from isthmus_shared.engines.kv_port import KvSink, KvSource
from isthmus_shared.ids import Generation, NodeId, TransferId, WorkerId, new_id, new_incarnation
from isthmus_shared.kv.manifest import GroupKind, KvDtype, KvGroup, KvManifest
from isthmus_shared.messages.work import KvTicket, RelayRef, WorkerRef

SECRET = b"a secret only for tests"
SLOT_BYTES = 4096
G1 = Generation(1)


def manifest_of(total_bytes: int, fingerprint: str = "test-model") -> KvManifest:
    """A manifest of that many bytes (a multiple of 4)."""
    assert total_bytes % 4 == 0
    tokens = total_bytes // 4
    group = KvGroup(kind=GroupKind.FULL, layer_ids=(0,), kv_heads=1, head_dim=1, token_start=0, token_end=tokens)
    return KvManifest(model_fingerprint=fingerprint, dtype=KvDtype.FP16, prompt_tokens=tokens, groups=(group,))


def pattern(total_bytes: int, seed: int = 1) -> bytes:
    """Bytes of which no two chunks are alike."""
    return b"".join((seed * 1_000_003 + i * 7).to_bytes(8, "big") for i in range(-(-total_bytes // 8)))[:total_bytes]


@dataclass
class Node:
    """A running daemon and what it has told its host."""

    daemon: RelayDaemon
    lost: list[tuple[WorkerRef, str]] = field(default_factory=list)
    closed: list[FlowClosed] = field(default_factory=list)

    @property
    def ref(self) -> RelayRef:
        return self.daemon.ref

    def at_rest(self) -> bool:
        return self.daemon.stats().at_rest and self.daemon.stats().credits_outstanding_bytes == 0

    def advertised_as(self, address: str) -> RelayRef:
        """Its ref, but reached through something at `address`."""
        return self.ref.model_copy(update={"address": address})


RETARGET_WAIT_S = 1.0
"""Short of a relay's usual one, so that a test sees its end."""


def daemon_settings(
    folder: Path,
    name: str,
    *,
    total_slots: int = 64,
    slot_bytes: int = SLOT_BYTES,
    out_share: float = 0.5,
    rate_bytes_per_s: float = math.inf,
    secret: bytes = SECRET,
    streams: int = 2,
    tcp: dict[str, float] | None = None,
    verbs: VerbsSettings | None = None,
    kind: TransportKind | None = None,
    load: Callable[[], Binding] = load_binding,
) -> DaemonSettings:
    settings = TcpSettings(host="127.0.0.1", port=0, advertise="127.0.0.1", streams=streams)
    return DaemonSettings(
        node_id=NodeId(name),
        socket=folder / f"{name}.sock",
        secret=secret,
        relay=RelaySettings(
            incarnation=new_incarnation(),
            slot_bytes=slot_bytes,
            total_slots=total_slots,
            out_share=out_share,
            rate_bytes_per_s=rate_bytes_per_s,
            retarget_wait_s=RETARGET_WAIT_S,
        ),
        transport=TransportSettings(
            tcp=dataclasses.replace(settings, **(tcp or {})),  # type: ignore[arg-type]
            kind=kind or (TransportKind.VERBS if verbs else TransportKind.TCP),
            verbs=verbs or VerbsSettings(),
            load=load,
        ),
    )


@contextlib.asynccontextmanager
async def running(settings: DaemonSettings, log: FilteringBoundLogger | None = None) -> AsyncIterator[Node]:
    node: Node

    def lost(worker: WorkerRef, why: str) -> None:
        node.lost.append((worker, why))

    def closed(event: FlowClosed) -> None:
        node.closed.append(event)

    silent = structlog.wrap_logger(structlog.PrintLogger(), processors=[_drop])
    daemon = RelayDaemon(settings, log=log or silent, on_client_lost=lost, on_flow_closed=closed)
    node = Node(daemon)
    await daemon.start()
    try:
        yield node
    finally:
        daemon.check_invariants()
        await daemon.stop()


def _drop(logger: object, method: str, event: dict[str, object]) -> dict[str, object]:
    raise structlog.DropEvent


@contextlib.asynccontextmanager
async def client_of(node: Node, name: str = "worker") -> AsyncIterator[RelayClient]:
    worker = worker_ref(node, name)
    client = await RelayClient.connect(str(node.daemon.settings.socket), worker=worker, timeout_s=5)
    try:
        yield client
    finally:
        await client.close()


def worker_ref(node: Node, name: str = "worker") -> WorkerRef:
    return WorkerRef(worker_id=WorkerId(name), incarnation=new_incarnation(), node_id=node.daemon.settings.node_id)


def new_transfer() -> TransferId:
    return TransferId(new_id("xfer"))


def write(sink: KvSink, data: bytes, start: int = 0) -> None:
    """Write and declare filled."""
    done = 0
    for view in sink.map(start, len(data)):
        view[:] = data[done : done + len(view)]
        done += len(view)
    sink.filled(start, len(data))


def read(source: KvSource) -> bytes:
    return b"".join(bytes(view) for view in source.map(0, source.total_bytes))


def ticket_for(relay: RelayRef, transfer_id: TransferId, total_bytes: int, generation: Generation = G1) -> KvTicket:
    return KvTicket(transfer_id=transfer_id, generation=generation, source=relay, manifest=manifest_of(total_bytes))
