"""What `isthmus up` says while it works: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.text import Text

_MARKS = {
    "ready": "[bold green]✓[/]",
    "process.ready": "[green]✓[/]",
    "process.ended": "[red]✗[/]",
    "failed": "[bold red]✗[/]",
    "stopped": "[green]✓[/]",
}
_END_WAITING = {"ready", "stopping", "failed", "stopped"}


class Reporter(Protocol):
    def say(self, event: str, text: str, **fields: object) -> None:
        """One thing that happened: a stable event name, a sentence for people, the facts for programs."""
        ...

    def waiting(self, text: str) -> None:
        """What is waited for at the moment, for whoever sits before a terminal."""
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

    def waiting(self, text: str) -> None:
        return


class TerminalReporter:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._waiting_for = ""

    def say(self, event: str, text: str, **fields: object) -> None:
        if self._console.quiet:
            return
        if event in _END_WAITING:
            self._stop_waiting()
        try:
            self._console.print(f"{_MARKS.get(event, '[dim]·[/]')} {escape(text)}", highlight=False, soft_wrap=True)
        except SystemExit:  # rich's answer to a reader that left, after it has made itself quiet
            return

    def waiting(self, text: str) -> None:
        """A last line with a spinner, below what was said; into a file or a pipe it is not written."""
        if not self._console.is_terminal or self._console.quiet or text == self._waiting_for:
            return
        self._waiting_for = text
        if self._status is None:
            self._status = self._console.status(_one_line(text))
            self._status.start()
        else:
            self._status.update(_one_line(text))

    def _stop_waiting(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _one_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")
