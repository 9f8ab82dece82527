"""`isthmus bench`: the relay's figures on this machine, and load for any server."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from isthmus_cli.bench_load import load
from isthmus_cli.exits import EPILOG, Exit
from isthmus_cli.failing import fail, help_if_alone
from isthmus_cli.files import write
from isthmus_cli.progress import working
from isthmus_kvrelay.bench import plot, relay_bench
from isthmus_kvrelay.bench.children import ChildFailed
from isthmus_shared.errors import ConfigInvalid, EngineFailed, IsthmusError

app = typer.Typer(help="Measure a part of Isthmus on this machine.", epilog=EPILOG, invoke_without_command=True)


@app.callback()
def _root(context: typer.Context) -> None:
    help_if_alone(context)


app.command(epilog=EPILOG)(load)


@app.command(epilog=EPILOG)
def relay(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds over all contenders.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Every figure, as JSON, on stdout.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write every figure there (JSON).")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw them there (.png, .svg).")] = None,
) -> None:
    """Move KV through two real relays, beside raw sockets: throughput, latency, CPU, hand-over, pacing, bursts.

    Run it when nothing else runs: figures of a busy machine are none. What was measured goes to stderr as it comes.
    """
    try:
        with (
            tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder,
            working(f"measuring, about {rounds / 2 + 1:.0f} minutes") as shown,
        ):
            found = relay_bench.run(Path(folder), rounds=rounds, say=shown.note)
        figures = json.dumps(found.as_json(), indent=1)
        print(figures if as_json else found.as_text())
        if out is not None:
            write(out, figures)
        if plot_file is not None:
            plot.draw(found, plot_file)
    except ChildFailed as error:
        fail(EngineFailed(str(error)), Exit.FAILED)
    except ConfigInvalid as error:
        fail(error, Exit.INVALID)
    except IsthmusError as error:
        fail(error, Exit.FAILED)
