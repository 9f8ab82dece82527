"""How every command says that it cannot go on: one line on stderr, and an exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from isthmus_cli.exits import Exit
from isthmus_shared.errors import IsthmusError


def fail(error: IsthmusError, code: Exit) -> NoReturn:
    """``isthmus: what: why; todo``."""
    print(f"isthmus: {error.text}", file=sys.stderr)
    raise typer.Exit(code) from error


def help_if_alone(context: typer.Context) -> None:
    """For a command that only has others below it: without one of them its help is shown, as wrong usage."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(Exit.INVALID)
