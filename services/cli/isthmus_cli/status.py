"""`isthmus status`: what the planner sees, as tables or JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from isthmus_cli.readiness import cluster_view
from isthmus_cli.state import ClusterState
from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.messages.health import ClusterView

MIB = 1024 * 1024
CONNECT_S = 5.0


async def fetch(bus_url: str) -> ClusterView:
    """Raises `Unavailable` or `DeadlineExceeded` when bus or planner do not answer."""
    bus = await NatsBus.connect(bus_url, name="isthmus status", timeout_s=CONNECT_S)
    async with bus:
        return await cluster_view(bus)


def as_json(cluster: ClusterState | None, view: ClusterView) -> str:
    fields: dict[str, Any] = {"view": view.model_dump(mode="json")}
    if cluster is not None:
        fields["cluster"] = cluster.model_dump(mode="json")
    return json.dumps(fields, indent=1)


def show(console: Console, cluster: ClusterState | None, view: ClusterView) -> None:
    if cluster is not None:
        console.print(f"[bold]{cluster.model}[/] at {cluster.http_url}/v1", highlight=False)
    console.print(_workers(view))
    console.print(_relays(view))
    console.print(_ingresses(view))
    if cluster is not None:
        console.print(_processes(cluster))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _workers(view: ClusterView) -> Table:
    table = _table("workers", "id", "node", "vendor", "roles", "state", "KV layout", "run", "wait", "KV free")
    for beat in view.workers:
        load = beat.load
        table.add_row(
            beat.worker_id,
            beat.node_id if beat.relay is not None else f"{beat.node_id} (no relay)",
            beat.vendor,
            ", ".join(beat.roles),
            beat.state.value,
            beat.kv_layout,
            str(load.running),
            str(load.waiting + load.loading),
            f"{load.kv_blocks_free}/{load.kv_blocks_total}",
        )
    return table


def _relays(view: ClusterView) -> Table:
    table = _table("relays", "node", "state", "staging free", "out", "in", "credits", "quarantined", "sent", "received")
    for beat in view.relays:
        table.add_row(
            beat.relay.node_id,
            beat.state.value,
            f"{_mib(beat.pool_free_bytes)}/{_mib(beat.pool_bytes)} MiB",
            str(beat.flows_out),
            str(beat.flows_in),
            f"{_mib(beat.credits_outstanding_bytes)} MiB",
            str(beat.slots_quarantined),
            f"{_mib(beat.sent_bytes)} MiB",
            f"{_mib(beat.received_bytes)} MiB",
        )
    return table


def _ingresses(view: ClusterView) -> Table:
    table = _table("ingresses", "id", "state", "address", "in flight")
    for beat in view.ingresses:
        table.add_row(beat.ingress_id, beat.state.value, beat.http_address or "", str(beat.requests_in_flight))
    return table


def _processes(cluster: ClusterState) -> Table:
    table = _table("processes", "name", "pid", "restarts", "log")
    for process in cluster.processes:
        pid = "down" if process.pid is None else str(process.pid)
        table.add_row(process.name, pid, str(process.restarts), process.log)
    return table


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f}"
