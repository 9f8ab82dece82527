"""`isthmus bench relay`: the relay's figures on this machine."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from isthmus_cli.exits import EPILOG, Exit
from isthmus_kvrelay.bench import plot, relay_bench
from isthmus_kvrelay.bench.children import ChildFailed
from isthmus_shared.errors import IsthmusError

app = typer.Typer(help="Measure a part of Isthmus on this machine.", epilog=EPILOG, no_args_is_help=True)


@app.callback()
def _root() -> None:
    return


@app.command(epilog=EPILOG)
def relay(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds over all contenders.", min=1)] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure there.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw them there (.png, .svg).")] = None,
) -> None:
    """Move KV through two real relays, beside raw sockets: throughput, latency, CPU, hand-over, pacing, bursts.

    Run it when nothing else runs: figures of a busy machine are none.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
            found = relay_bench.run(Path(folder), rounds=rounds, say=lambda text: print(text, file=sys.stderr))
        print(found.as_text())
        if json_file is not None:
            json_file.write_text(json.dumps(found.as_json(), indent=1))
        if plot_file is not None:
            plot.draw(found, plot_file)
    except ChildFailed as error:
        print(f"isthmus: {error}", file=sys.stderr)
        raise typer.Exit(Exit.FAILED) from error
    except IsthmusError as error:
        print(f"isthmus: {error.text}", file=sys.stderr)
        raise typer.Exit(Exit.FAILED) from error
