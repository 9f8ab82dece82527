"""What `isthmus up` says while it works: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
from typing import Protocol

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
    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, event: str, text: str, **fields: object) -> None:
        line = json.dumps({"event": event, "text": text, **fields}, default=str, ensure_ascii=False)
        self._console.file.write(line + "\n")
        self._console.file.flush()


class TerminalReporter:
    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, event: str, text: str, **fields: object) -> None:
        self._console.print(f"{_MARKS.get(event, '[dim]·[/]')} {escape(text)}", highlight=False, soft_wrap=True)
