"""Writes Grafana's dashboards and `docs/metrics.md` from the code's one list of metrics.

python tools/gen_dashboards.py          write
python tools/gen_dashboards.py --check  exit 1 if what is there differs
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "shared"))

from isthmus_shared.metrics import Metrics  # noqa: E402

DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT, COLUMNS = 8, 7, 24
INTRO = """\
# Metrics

Every process answers `GET /metrics` in Prometheus' text format. Labels have few values each: never a request id, a key
or a subject. What is not a process' own business stays at zero there.

This page is generated from the code by `make schemas`.

| metric | type | labels | meaning |
| --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    """Grafana's name of it."""
    queries: tuple[tuple[str, str], ...]
    """(PromQL, legend). What may never have happened yet is `… or vector(0)`, so that no panel is empty."""


def rate(metric: str, by: str = "") -> str:
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({metric}[$__rate_interval]))"


def never(expression: str) -> str:
    return f"{expression} or vector(0)"


def quantile(share: float, metric: str, by: str = "") -> str:
    labels = ", ".join(label for label in ("le", by) if label)
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval])))"


def latency(title: str, metric: str) -> Panel:
    return Panel(title, "s", tuple((quantile(q, metric), f"p{round(q * 100)}") for q in (0.5, 0.9, 0.99)))


SERVING = (
    Panel("Requests in progress", "short", (("sum(isthmus_requests_in_flight)", "in progress"),)),
    Panel("Requests ended by outcome", "reqps", ((rate("isthmus_requests_total", "outcome"), "{{outcome}}"),)),
    Panel("Refused before any work", "reqps", ((never(rate("isthmus_requests_rejected_total", "code")), "{{code}}"),)),
    latency("Time to first token", "isthmus_time_to_first_token_seconds"),
    latency("Inter-token latency", "isthmus_inter_token_latency_seconds"),
    Panel("Late tokens by cause", "short", ((rate("isthmus_itl_excursions_total", "cause"), "{{cause}}/s"),)),
    latency("End to end", "isthmus_e2e_request_latency_seconds"),
    Panel(
        "Tokens",
        "short",
        ((rate("isthmus_prompt_tokens_total"), "prompt/s"), (rate("isthmus_generation_tokens_total"), "output/s")),
    ),
    Panel("Second attempts", "reqps", ((never(rate("isthmus_replans_total", "code")), "{{code}}"),)),
    Panel(
        "Choices ended", "short", ((rate("isthmus_request_success_total", "finished_reason"), "{{finished_reason}}"),)
    ),
    Panel("Ended by the client's leaving", "reqps", ((rate("isthmus_cancellations_total"), "cancelled/s"),)),
)
WORKERS = (
    Panel("Workers", "short", (("sum by (role, state) (isthmus_workers)", "{{role}} {{state}}"),)),
    Panel("Workers taken for dead", "short", ((never("sum by (cause) (isthmus_workers_lost_total)"), "{{cause}}"),)),
    Panel(
        "KV cache in use",
        "percentunit",
        (("isthmus_kv_cache_usage_perc and (isthmus_engine_kv_blocks > 0)", "{{instance}}"),),
    ),
    Panel(
        "Sequences",
        "short",
        (
            ("sum(isthmus_num_requests_running)", "running"),
            ("sum by (reason) (isthmus_num_requests_waiting_by_reason)", "waiting: {{reason}}"),
        ),
    ),
    Panel(
        "Engine step p50",
        "s",
        ((quantile(0.5, "isthmus_engine_step_seconds", "phase"), "{{phase}}"),),
    ),
    Panel("Tokens computed", "short", ((rate("isthmus_engine_tokens_total", "phase"), "{{phase}}/s"),)),
    Panel("Routes by mode", "reqps", ((rate("isthmus_routes_total", "mode, outcome"), "{{mode}} {{outcome}}"),)),
    Panel(
        "TTFT, predicted and actual, p50",
        "s",
        (
            (quantile(0.5, "isthmus_request_predicted_ttft_seconds"), "predicted"),
            (quantile(0.5, "isthmus_time_to_first_token_seconds"), "actual"),
        ),
    ),
    Panel("Bus within reach", "short", (("isthmus_bus_connected", "{{instance}}"),)),
)
RELAYS = (
    Panel("KV sent", "Bps", ((never(rate("isthmus_relay_sent_bytes_total", "transport")), "{{transport}}"),)),
    Panel("KV received", "Bps", ((never(rate("isthmus_relay_received_bytes_total", "transport")), "{{transport}}"),)),
    Panel(
        "Staging in use",
        "percentunit",
        (("1 - isthmus_relay_pool_free_bytes / (isthmus_relay_pool_bytes > 0)", "{{instance}}"),),
    ),
    Panel("Flows open", "short", (("sum by (direction) (isthmus_relay_flows)", "{{direction}}"),)),
    Panel(
        "Flows ended",
        "short",
        ((never(rate("isthmus_relay_flows_ended_total", "direction, cause")), "{{direction}} {{cause}}"),),
    ),
    Panel("Credit not yet used", "bytes", (("isthmus_relay_credits_outstanding_bytes", "{{instance}}"),)),
    Panel("A chunk's wait for its lane, p99", "s", ((quantile(0.99, "isthmus_relay_queue_seconds"), "p99"),)),
    Panel("Lanes", "short", ((never("sum by (state) (isthmus_relay_lanes)"), "{{state}}"),)),
    Panel("Slowed down after feedback", "short", ((rate("isthmus_relay_rate_decreases_total"), "decreases/s"),)),
    Panel(
        "Integrity",
        "short",
        (
            ("sum(isthmus_relay_checksum_failures_total)", "checksum failures"),
            (never("sum(isthmus_relay_stale_total)"), "stale frames"),
            ("sum(isthmus_relay_quarantines_total)", "quarantines"),
        ),
    ),
    Panel("Slots kept for a retry", "short", (("sum(isthmus_relay_slots_retained)", "retained"),)),
    Panel("Fetched again by another", "short", (("sum(isthmus_relay_retargets_total)", "re-targets"),)),
)
DASHBOARDS = {"serving": SERVING, "workers": WORKERS, "relays": RELAYS}


def dashboard(name: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    return {
        "uid": f"isthmus-{name}",
        "title": f"Isthmus: {name}",
        "tags": ["isthmus"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["isthmus"], "title": "Isthmus", "asDropdown": False}],
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS // WIDTH)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def metrics_page() -> str:
    rows = []
    for family, labels in _families():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return INTRO + "\n".join(rows) + "\n"


def _families() -> list[tuple[Any, str]]:
    metrics = Metrics()
    found = []
    for instrument in vars(metrics).values():
        if hasattr(instrument, "describe"):
            (family,) = instrument.describe()
            found.append((family, ", ".join(f"`{label}`" for label in instrument._labelnames)))
    return found


def unknown_names() -> set[str]:
    """Metrics that a panel asks for and no process has."""
    known = {family.name for family, _ in _families()}
    asked = {
        name
        for panels in DASHBOARDS.values()
        for panel in panels
        for expression, _ in panel.queries
        for name in re.findall(r"isthmus_\w+", expression)
    }
    return {name for name in asked if re.sub(r"_(total|bucket|sum|count)$", "", name) not in known}


def files() -> dict[Path, str]:
    made = {
        ROOT / "compose" / "grafana" / "dashboards" / f"{name}.json": json.dumps(dashboard(name, panels), indent=1)
        + "\n"
        for name, panels in DASHBOARDS.items()
    }
    return {**made, ROOT / "docs" / "metrics.md": metrics_page()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    options = parser.parse_args()
    if unknown := unknown_names():
        print(f"no such metrics: {', '.join(sorted(unknown))}")
        return 1
    differs = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    if options.check:
        for path in differs:
            print(f"{path.name} does not match the code's metrics; run `make schemas` and commit")
        return int(bool(differs))
    for path in differs:
        path.write_text(files()[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
