"""What `isthmus up` says while it works: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.markup import escape

_MARKS = {
    "ready": "[bold green]✓[/]",
    "process.ready": "[green]✓[/]",
    "process.ended": "[red]✗[/]",
    "failed": "[bold red]✗[/]",
    "stopped": "[green]✓[/]",
}


class Reporter(Protocol):
    def say(self, event: str, text: str, **fields: object) -> None:
        """One thing that happened: a stable event name, a sentence for people, the facts for programs."""
        ...


class JsonReporter:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def say(self, event: str, text: str, **fields: object) -> None:
        line = json.dumps({"event": event, "text": text, **fields}, default=str, ensure_ascii=False)
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except BrokenPipeError:  # nobody reads on; the cluster does not end for that
            self._stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process


class TerminalReporter:
    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, event: str, text: str, **fields: object) -> None:
        if self._console.quiet:
            return
        try:
            self._console.print(f"{_MARKS.get(event, '[dim]·[/]')} {escape(text)}", highlight=False, soft_wrap=True)
        except SystemExit:  # rich's answer to a reader that left, after it has made itself quiet
            return
