"""`isthmus plan`: which nodes should prefill, decode or stay aggregated. The arithmetic is `isthmus_planner.plan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from isthmus_cli.exits import EPILOG, Exit
from isthmus_cli.failing import fail
from isthmus_cli.files import write
from isthmus_cli.progress import working
from isthmus_shared.errors import ConfigInvalid

if TYPE_CHECKING:
    from isthmus_planner.plan.options import Option
    from isthmus_planner.plan.planning import Plan

PIPE_COLUMNS = 160
"""Width of tables that go into a file or a pipe."""
EXTRA = {"numpy", "scipy", "numba", "llvmlite"}
"""What only the extra `plan` installs."""


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(plan)


def plan(
    cluster: Annotated[Path, typer.Argument(help="Node types: accelerators, counts, prices (YAML).")],
    workload: Annotated[Path, typer.Argument(help="Model, requests and targets (YAML).")],
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON, on stdout.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts there.")] = None,
    cluster_out: Annotated[
        Path | None, typer.Option("--cluster", help="Write a cluster file for `isthmus up` there.")
    ] = None,
    constants: Annotated[
        Path | None, typer.Option(help="Your own measurements' constants, from `isthmus calibrate --out`.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the simulations.", min=0)] = 0,
) -> None:
    """Find who should prefill, who decode, and whether to disaggregate at all.

    Closed forms search, a simulator checks. Nothing is started and nothing is sent anywhere.
    """
    try:
        with working("planning: closed forms search, a simulator checks"):
            made = _made(cluster, workload, constants, seed)
        _write(made, html, cluster_out)
    except ConfigInvalid as error:
        fail(error, Exit.INVALID)
    if as_json:
        from isthmus_planner.plan.as_json import plan_bytes

        sys.stdout.buffer.write(plan_bytes(made))
    else:
        show(Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS), made)


def missing_extra(error: ModuleNotFoundError) -> ConfigInvalid:
    """What to say when the planning libraries are not installed; another module's absence is a bug and stays one."""
    if error.name is None or error.name.split(".")[0] not in EXTRA:
        raise error
    return ConfigInvalid(f"{error.name} is not installed", todo="pip install 'isthmus[plan]'")


def _made(cluster: Path, workload: Path, constants: Path | None, seed: int) -> Plan:
    try:  # numpy, scipy and numba: not for those who only run a cluster
        from isthmus_planner.plan.inputs import load_calibration, load_cluster, load_workload
        from isthmus_planner.plan.planning import make_plan
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    servers, asked_for = load_cluster(cluster), load_workload(workload)
    calibration = None if constants is None else load_calibration(constants)
    return make_plan(servers, asked_for, cluster.parent, calibration=calibration, seed=seed)


def _write(made: Plan, html: Path | None, cluster_out: Path | None) -> None:
    from isthmus_planner.plan.cluster_file import cluster_text
    from isthmus_planner.plan.html import plan_html

    texts = [(html, plan_html), (cluster_out, cluster_text)]
    for path, make in texts:
        if path is not None:
            write(path, make(made))


def show(console: Console, made: Plan) -> None:
    from isthmus_planner.plan.html import asked, named_options

    console.print(f"[bold]{made.verdict}[/bold]")
    console.print(asked(made))
    console.print(_servers_table(made))
    console.print(_options_table(named_options(made), saturated=made.targets.ttft_s is None))
    if made.pareto:
        console.print(_pareto_table(made))
    for reason in made.reasons:
        console.print(f"- {reason}", highlight=False)
    more = ", ".join(f"{each.node_type} {each.share:+.1%}" for each in made.one_more)
    console.print(f"- One more server of a type would bring the fastest plan: {more}.", highlight=False)
    for lane in made.settings.lanes if made.settings is not None else ():
        console.print(
            f"- Settings of a {lane.node_type} decode replica: blocks of {lane.block_tokens} tokens, batch "
            f"{lane.max_batch}, KV paced to {lane.pace_bytes_per_s / 1e9:.2f} GB/s (needs "
            f"{lane.need_bytes_per_s / 1e9:.2f}), {lane.credit_window_chunks} chunks of credit.",
            highlight=False,
        )


def _servers_table(made: Plan) -> Table:
    table = Table(
        "node type", "servers", "prefill", "decode", "aggregated", "idle", "tp", "constants", title="Recommended"
    )
    for each, counts in zip(made.offers, made.recommended.assignment.counts, strict=True):
        used = {role: count for role, count in counts.items() if count > 0}
        layouts = ", ".join(f"{each.by_role[role].tp} ({role.value})" for role in used) or "–"
        by_role = {role.value: count for role, count in used.items()}
        cells = [_count(by_role.get(role, 0.0)) for role in ("prefill", "decode", "aggregated")]
        idle = _count(each.node.count - sum(used.values()))
        calibrated = all(each.by_role[role].constants.calibrated for role in used)
        origin = "–" if not used else "calibrated" if calibrated else "not calibrated"
        table.add_row(each.node.name, str(each.node.count), *cells, idle, layouts, origin)
    return table


def _count(value: float) -> str:
    return f"{value:g}" if value > 0 else "–"


def _options_table(options: list[tuple[str, Option]], *, saturated: bool) -> Table:
    """`saturated`: without a TTFT target requests queue, and their TTFT says nothing."""
    table = Table(title="p50 / p90 by closed forms, and simulated at the highest load within the targets")
    for column in ("plan", "requests/s", "output tok/s", "$/M output", "TTFT ms", "ITL ms"):
        table.add_column(column)
    for column in ("sim. req/s", "sim. TTFT ms", "sim. ITL ms"):
        table.add_column(column, style="cyan")
    for name, option in options:
        price = option.usd_per_m_output_tokens
        cells = [
            name,
            f"{option.requests_per_s.p50:.2f} / {option.requests_per_s.p90:.2f}",
            f"{option.output_tokens_per_s.p50:,.0f} / {option.output_tokens_per_s.p90:,.0f}",
            "unknown" if price is None else f"{price.p50:.3f} / {price.p90:.3f}",
            f"{option.ttft_s.p50 * 1e3:.0f} / {option.ttft_s.p90 * 1e3:.0f}",
            f"{option.itl_s.p50 * 1e3:.2f} / {option.itl_s.p90 * 1e3:.2f}",
        ]
        found = option.simulated
        if found is None:
            table.add_row(*cells, "–", "–", "–")
        else:
            rate = f"{found.requests_per_s:.2f}" + ("" if found.steady else " (unsettled)")
            rate += "" if found.within_targets else " (late)"
            ttft = "saturated" if saturated else f"{found.ttft_p50_s * 1e3:.0f} / {found.ttft_p90_s * 1e3:.0f}"
            table.add_row(*cells, rate, ttft, f"{found.itl_s * 1e3:.2f} / {found.itl_p90_s * 1e3:.2f}")
    return table


def _pareto_table(made: Plan) -> Table:
    table = Table("servers", "$/h", "output tok/s", "$/M output", title="From cheap to fast (Pareto)")
    for option in made.pareto:
        parts = []
        for each, counts in zip(made.offers, option.assignment.counts, strict=True):
            parts += [f"{count:g} {each.node.name} {role.value}" for role, count in counts.items() if count > 0]
        price = option.usd_per_m_output_tokens
        mark = " ←" if option.assignment.counts == made.recommended.assignment.counts else ""
        table.add_row(
            ", ".join(parts),
            f"{option.assignment.usd_per_h or 0.0:.2f}",
            f"{option.output_tokens_per_s.p50:,.0f}",
            ("unknown" if price is None else f"{price.p50:.3f}") + mark,
        )
    return table
