"""`isthmus reproduce`: published results beside their simulation. The arithmetic is `isthmus_planner.reproduce`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from isthmus_cli.exits import EPILOG, Exit
from isthmus_cli.failing import fail
from isthmus_cli.plan import PIPE_COLUMNS, missing_extra
from isthmus_cli.progress import working
from isthmus_shared.errors import ConfigInvalid

if TYPE_CHECKING:
    from isthmus_planner.reproduce.claims import Check
    from isthmus_planner.reproduce.report import Reproduction


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(reproduce)


def reproduce(
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON, on stdout.")] = False,
    seed: Annotated[int, typer.Option(help="Of the simulations.", min=0)] = 0,
) -> None:
    """Simulate published results: a cross-vendor report and a DeepSeek-R1 case, as published / simulated / error.

    Every mechanism that was fitted is named, and switched off in turn. Exit code 1 if a statement is not met.
    """
    try:  # numpy, scipy and numba: not for those who only run a cluster
        from isthmus_planner.reproduce.report import reproduce as run
        from isthmus_planner.reproduce.report import reproduction_bytes
    except ModuleNotFoundError as error:
        try:
            raise missing_extra(error) from error
        except ConfigInvalid as invalid:
            fail(invalid, Exit.INVALID)
    with working("simulating") as shown:
        found = run(seed=seed, on_step=shown.step)
    if as_json:
        sys.stdout.buffer.write(reproduction_bytes(found))
    else:
        show(Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS), found)
    raise typer.Exit(Exit.OK if found.holds else Exit.FAILED)


def show(console: Console, found: Reproduction) -> None:
    from isthmus_planner.reproduce.report import CAUTION, INTERFERENCE

    cross, deepseek = found.published.cross_vendor, found.published.deepseek
    console.print(f"[bold]{cross.title}[/bold]\n{cross.source}\n{cross.url}", highlight=False)
    console.print(_cells(found))
    console.print(_checks(list(found.checks)))
    console.print(
        f"{found.fitted} constants fitted to {found.numbers} published numbers and the orderings at "
        f"{found.ordered} of {len(found.run.cells)} operating points:",
        highlight=False,
    )
    for name, value in _fitted(found):
        console.print(f"  {name} = {value}", highlight=False)
    console.print(_ablations(found))
    console.print(f"[bold]{deepseek.title}[/bold]\n{deepseek.source}\n{deepseek.url}", highlight=False)
    console.print(_checks(list(found.deepseek_checks)))
    assumed, fitted = found.constants.deepseek.assumed, found.constants.deepseek.fitted
    bare = found.deepseek_without_interference
    console.print(
        f"Assumed workload: {assumed.isl_tokens} prompt and {assumed.osl_tokens} answer tokens, "
        f"{assumed.clients_per_server} clients a server ({assumed.why}). One constant fitted to 3 figures: a prefill "
        f"beside running sequences takes {1 + fitted.interference:.2f} times as long ({INTERFERENCE}). Without it: "
        f"{bare.fast_alone:.2f}, {bare.slow_alone:.2f}, {bare.balanced:.2f} and {bare.disaggregated:.2f} tok/s. "
        "With as many free choices as figures this shows that the figures are consistent, no more.",
        highlight=False,
    )
    console.print(f"[bold]{CAUTION}[/bold]", highlight=False)


def _cells(found: Reproduction) -> Table:
    table = Table(title="Simulated, every operating point (ratios: cross / single)")
    for column in (
        "ISL/OSL",
        "C",
        "E2EL ratio",
        "TPS ratio",
        "cross E2EL s",
        "single E2EL s",
        "cross tok/s",
        "single tok/s",
    ):
        table.add_column(column, justify="right")
    last = ""
    for cell in found.run.cells:
        if last and cell.scenario != last:
            table.add_section()
        last = cell.scenario
        table.add_row(
            cell.scenario,
            str(cell.concurrency),
            f"{cell.e2el_ratio:.3f}",
            f"{cell.tps_ratio:.3f}",
            f"{cell.cross_e2el_s:.2f}",
            f"{cell.single_e2el_s:.2f}",
            f"{cell.cross_tps:,.0f}",
            f"{cell.single_tps:,.0f}",
        )
    return table


def _checks(checks: list[Check]) -> Table:
    table = Table("case", "published", "simulated", "error", "tolerance", "", title="Published / simulated / error")
    for check in checks:
        error = "–" if check.error is None else f"{check.error:+.1%}"
        tolerance = "–" if check.tolerance == 0 else f"{check.tolerance:.0%}"
        mark = "[green]met[/green]" if check.holds else "[red]not met[/red]"
        table.add_row(check.case, check.says, check.simulated, error, tolerance, mark)
    return table


def _fitted(found: Reproduction) -> list[tuple[str, str]]:
    fitted = found.constants.cross_fitted
    return [
        ("kv_intake, cross", f"{fitted.cross_intake_bytes_per_s / 1e9:.3f} GB/s"),
        ("kv_intake, single", f"{fitted.single_intake_bytes_per_s / 1e9:.3f} GB/s"),
        (
            "resident_kv_step, single",
            f"{fitted.resident_step_s_per_token * 1e9:.1f} ns a step for each token above the next",
        ),
        ("resident_kv threshold", f"{fitted.resident_above_tokens:,.0f} tokens"),
        (
            "resident_kv_receive, single",
            f"{fitted.resident_receive_s_per_pair * 1e12:.1f} ps for each token received and token held above it",
        ),
        ("transfer_stall, cross", f"{fitted.cross_stall_s_per_token * 1e6:.1f} µs of decode for each token that joins"),
    ]


def _ablations(found: Reproduction) -> Table:
    total = len(found.checks)
    table = Table(
        "mechanism off", "E2EL mean", "TPS mean", "statements met", "lost", title="Each mechanism switched off"
    )
    everything = sum(check.holds for check in found.checks)
    run = found.run
    table.add_row(
        "none", f"{run.e2el_geometric_mean:.3f}", f"{run.tps_geometric_mean:.3f}", f"{everything}/{total}", "–"
    )
    for each in found.ablations:
        lost = "; ".join(each.lost) or "–"
        held = f"{each.held}/{total}"
        table.add_row(each.mechanism, f"{each.e2el_geometric_mean:.3f}", f"{each.tps_geometric_mean:.3f}", held, lost)
    return table
