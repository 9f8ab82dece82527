"""`isthmus status`: what the planner sees, as tables or JSON."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from isthmus_cli.dialling import dial
from isthmus_cli.readiness import cluster_view
from isthmus_cli.state import ClusterState
from isthmus_shared.messages.health import ClusterView, Foreseen

MIB = 1024 * 1024
CONNECT_S = 5.0


async def fetch(bus_url: str) -> ClusterView:
    """Raises `Unavailable` or `DeadlineExceeded` when bus or planner do not answer."""
    bus = await dial(bus_url, name="isthmus status", timeout_s=CONNECT_S)
    async with bus:
        return await cluster_view(bus)


def as_fields(cluster: ClusterState | None, view: ClusterView | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"view": None if view is None else view.model_dump(mode="json")}
    if cluster is not None:
        fields["cluster"] = cluster.as_fields()
    return fields


def tables(cluster: ClusterState | None, view: ClusterView) -> list[RenderableType]:
    shown: list[RenderableType] = []
    if cluster is not None:
        shown.append(Text.assemble((cluster.model, "bold"), f" at {cluster.http_url}/v1"))
    shown += [_workers(view), _relays(view), _ingresses(view), _planners(view)]
    if any(each.ttft is not None or each.itl is not None for each in view.forecasts):
        shown.append(_forecasts(view))
    if cluster is not None:
        shown.append(_processes(cluster))
    return shown


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _workers(view: ClusterView) -> Table:
    table = new_table("workers", "id", "node", "vendor", "roles", "state", "KV layout", "run", "wait", "KV free")
    slow = {each.incarnation: each.slowdown for each in view.forecasts if each.drifting}
    for beat in view.workers:
        load, slowdown = beat.load, slow.get(beat.incarnation)
        table.add_row(
            beat.worker_id,
            beat.node_id if beat.relay is not None else f"{beat.node_id} (no relay)",
            beat.vendor,
            ", ".join(beat.roles),
            beat.state.value if slowdown is None else f"{beat.state.value}, drifting (steps x {slowdown:.2g})",
            beat.kv_layout,
            str(load.running),
            str(load.waiting + load.loading),
            f"{load.kv_blocks_free}/{load.kv_blocks_total}",
        )
    return table


def _relays(view: ClusterView) -> Table:
    table = new_table(
        "relays", "node", "state", "staging free", "out", "in", "credits", "quarantined", "sent", "received"
    )
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
    table = new_table(
        "ingresses", "id", "state", "address", "in flight", "TTFT p50", "predicted", "ITL p50", "predicted"
    )
    for beat in view.ingresses:
        cells = (beat.ingress_id, beat.state.value, beat.http_address or "", str(beat.requests_in_flight))
        table.add_row(*cells, *_foreseen(beat.ttft), *_foreseen(beat.itl))
    return table


def _planners(view: ClusterView) -> Table:
    table = new_table("planners", "life", "state", "leads", "epoch", "routes", "problem")
    for beat in view.planners:
        leads = ("yes", str(beat.epoch)) if beat.leader else ("no", "")
        table.add_row(beat.incarnation, beat.state.value, *leads, str(beat.routes_total), beat.leader_problem)
    return table


def _forecasts(view: ClusterView) -> Table:
    """Only of workers whose requests have ended."""
    table = new_table("predictions", "worker", "requests", "TTFT p50", "predicted", "ITL p50", "predicted")
    for each in view.forecasts:
        if each.ttft is not None or each.itl is not None:
            requests = max(0 if seen is None else seen.requests for seen in (each.ttft, each.itl))
            table.add_row(each.worker_id, str(requests), *_foreseen(each.ttft), *_foreseen(each.itl))
    return table


def _foreseen(latency: Foreseen | None) -> tuple[str, str]:
    """Actual, and predicted with the median of the requests' errors."""
    if latency is None:
        return "–", "–"
    return in_ms(latency.actual_p50_s), f"{in_ms(latency.predicted_p50_s)} (off {latency.error:.0%})"


def in_ms(time_s: float) -> str:
    return f"{time_s * 1e3:.3g} ms" if time_s < 1 else f"{time_s:.2f} s"


def _processes(cluster: ClusterState) -> Table:
    table = new_table("processes", "name", "pid", "restarts", "log")
    for process in cluster.processes:
        pid = "down" if process.pid is None else str(process.pid)
        table.add_row(process.name, pid, str(process.restarts), process.log)
    return table


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f}"
