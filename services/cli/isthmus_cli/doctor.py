"""`isthmus doctor`: what is wrong on this machine and between its relays, and the command that mends it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from isthmus_cli import status as status_view
from isthmus_cli.checks import all_checks
from isthmus_cli.exits import EPILOG, Exit
from isthmus_cli.pairs import OnPair, check_pairs, check_reachable
from isthmus_cli.progress import working
from isthmus_cli.state import DEFAULT_STATE_DIR, ClusterState, StateDir
from isthmus_kvrelay.transports.verbs.doctor import Finding, Grade
from isthmus_shared.errors import IsthmusError, Unavailable

POOL_BYTES = 256 << 20
"""The relay's default."""
PORT = 8000
MARKS = {Grade.OK: "[green]ok[/]", Grade.WARNING: "[yellow]warning[/]", Grade.ERROR: "[red]error[/]"}


def command(
    state_dir: Annotated[Path, typer.Option("--state-dir", help="Folder of the cluster to test.")] = DEFAULT_STATE_DIR,
    pool_bytes: Annotated[int, typer.Option(help="Staging pool that a relay here will have.", min=1)] = POOL_BYTES,
    port: Annotated[int, typer.Option(help="Port of the endpoint that will start here.", min=0, max=65535)] = PORT,
    as_json: Annotated[bool, typer.Option("--json", help="Every finding, as JSON.")] = False,
) -> None:
    """Check this machine and, if a cluster runs, move a verified transfer between each pair of its relays.

    Exit code 1 if anything is an error, else 0.
    """
    try:
        cluster: ClusterState | None = StateDir(state_dir).read()
    except Unavailable:
        cluster = None
    # The cluster's own endpoint holds its port.
    findings = all_checks(pool_bytes=pool_bytes, port=None if cluster is not None else port)
    if cluster is None:
        findings.append(Finding("pair", Grade.OK, "no cluster runs here, so no pair of relays was tested"))
    else:
        sockets = {path.stem: path for path in Path(cluster.run_dir).glob("*.sock")}
        with working("connecting to the relays") as shown:
            findings += asyncio.run(_check_cluster(cluster, sockets, shown.step))
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        show(Console(), findings)
    if any(finding.grade is Grade.ERROR for finding in findings):
        raise typer.Exit(Exit.FAILED)


async def _check_cluster(cluster: ClusterState, sockets: dict[str, Path], on_pair: OnPair) -> list[Finding]:
    findings = await check_pairs(sockets, on_pair)
    try:
        view = await status_view.fetch(cluster.bus_url)
    except IsthmusError as error:
        findings.append(Finding("planner", Grade.ERROR, error.text, "isthmus status, and the planner's log"))
        return findings
    return findings + await check_reachable(view, but=set(sockets))


def show(console: Console, findings: Sequence[Finding]) -> None:
    for finding in findings:
        text = escape(f"{finding.check}: {finding.what}")  # "isthmus[rdma]" is no markup
        console.print(f"{MARKS[finding.grade]:18} {text}", highlight=False, soft_wrap=True)
        if finding.mend and finding.grade is not Grade.OK:
            console.print(f"        mend: {finding.mend}", highlight=False, markup=False, soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    app.command(name="doctor", epilog=EPILOG)(command)
