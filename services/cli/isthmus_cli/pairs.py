"""Pair tests of `isthmus doctor`: a verified transfer from each relay of this machine's cluster to each other one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from isthmus_kvrelay.client import RelayClient
from isthmus_kvrelay.transports.verbs.doctor import Finding, Grade
from isthmus_shared.errors import IsthmusError
from isthmus_shared.ids import Generation, NodeId, TransferId, WorkerId, new_id, new_incarnation
from isthmus_shared.kv.manifest import GroupKind, KvDtype, KvGroup, KvManifest
from isthmus_shared.messages.health import ClusterView
from isthmus_shared.messages.work import KvTicket, WorkerRef

TRANSFER_TOKENS = 64
TOKEN_BYTES = 4096
DEADLINE_S = 10.0
CONNECT_S = 5.0


OnPair = Callable[[str, int, int], None]
"""What is tested now, how many were before it, and how many there are."""


async def check_pairs(sockets: dict[str, Path], on_pair: OnPair) -> list[Finding]:
    """`sockets`: node → its relay's. Same node to same node is its shared memory."""
    findings = []
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, RelayClient] = {}
        for node, path in sorted(sockets.items()):
            try:
                clients[node] = await _client(path, node)
            except IsthmusError as error:
                mend = f"isthmus status, and the log of kvrelay on {node}"
                findings.append(Finding("relay", Grade.ERROR, f"the relay of {node}: {error.text}", mend))
            else:
                stack.push_async_callback(clients[node].close)
        pairs = [(source, target) for source in clients for target in clients]
        for number, (source, target) in enumerate(pairs):
            on_pair(f"{source} → {target}", number, len(pairs))
            findings.append(await _check_pair(source, clients[source], target, clients[target]))
    return findings


async def _client(path: Path, node: str) -> RelayClient:
    worker = WorkerRef(worker_id=WorkerId("doctor"), incarnation=new_incarnation(), node_id=NodeId(node))
    return await RelayClient.connect(str(path), worker=worker, timeout_s=CONNECT_S)


async def _check_pair(source: str, producer: RelayClient, target: str, consumer: RelayClient) -> Finding:
    name = f"{source} → {target}"
    try:
        took_s = await _transfer(producer, consumer)
    except IsthmusError as error:
        mend = f"check that {target} reaches {producer.relay.address}, and that both have one ISTHMUS_RELAY_SECRET"
        return Finding("pair", Grade.ERROR, f"{name}: {error.text}", mend)
    if took_s is None:
        return Finding(
            "pair", Grade.ERROR, f"{name}: the bytes came changed", "replace the machine's memory or adapter"
        )
    return Finding("pair", Grade.OK, f"{name}: {TRANSFER_TOKENS * TOKEN_BYTES >> 10} KiB in {took_s * 1e3:.1f} ms")


async def _transfer(producer: RelayClient, consumer: RelayClient) -> float | None:
    """Seconds that it took; None when what came is not what was sent."""
    shape = {"kv_heads": 1, "head_dim": TOKEN_BYTES // 4}
    group = KvGroup(kind=GroupKind.FULL, layer_ids=(0,), token_start=0, token_end=TRANSFER_TOKENS, **shape)
    manifest = KvManifest(
        model_fingerprint="doctor", dtype=KvDtype.FP16, prompt_tokens=TRANSFER_TOKENS, groups=(group,)
    )
    transfer, total, loop = TransferId(new_id("xfer")), manifest.total_bytes, asyncio.get_running_loop()
    data = bytes(range(256)) * (total // 256)
    sink = await producer.open_sink(transfer, Generation(1), manifest, deadline_s=DEADLINE_S, wait_s=CONNECT_S)
    done = 0
    for view in sink.map(0, total):
        view[:] = data[done : done + len(view)]
        done += len(view)
    sink.filled(0, total)
    sink.seal()
    began_s = loop.time()
    ticket = KvTicket(transfer_id=transfer, generation=Generation(1), source=producer.relay, manifest=manifest)
    source = await consumer.open_source(ticket, deadline_s=DEADLINE_S)
    try:
        await source.ready()
        took_s = loop.time() - began_s
        return took_s if b"".join(bytes(view) for view in source.map(0, total)) == data else None
    finally:
        source.release()


async def check_reachable(view: ClusterView, *, but: set[str]) -> list[Finding]:
    """Relays of other machines: whether a connection from here comes about. `but`: nodes that were tested already."""
    findings = []
    for beat in view.relays:
        if beat.relay.node_id in but:
            continue
        host, _, port = beat.relay.address.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError) as error:
            what = f"the relay of {beat.relay.node_id} at {beat.relay.address} is not reached from here: {error}"
            mend = f"open the port in the firewall between them, or set ISTHMUS_RELAY_ADVERTISE on {beat.relay.node_id}"
            findings.append(Finding("pair", Grade.ERROR, what, mend))
        else:
            writer.close()
            what = f"the relay of {beat.relay.node_id} at {beat.relay.address} is reached from here"
            findings.append(Finding("pair", Grade.OK, what))
    return findings
