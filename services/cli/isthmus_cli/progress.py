"""What is going on while a command works: a line on a terminal's stderr that is gone when the work is done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Working:
    """Made by `working`."""

    def __init__(self, shown: Progress, task: TaskID) -> None:
        self._shown, self._task = shown, task

    def step(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """What is done now; `done` of `total` if it is known, else the bar only says that something moves."""
        self._shown.update(self._task, description=text, completed=done, total=total)

    def note(self, text: str) -> None:
        """A line that stays, on a terminal or not."""
        self._shown.console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def working(text: str, console: Console | None = None) -> Iterator[Working]:
    """Into a file or a pipe nothing is written but notes: there a bar is only noise."""
    console = console if console is not None else Console(file=sys.stderr)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        yield Working(shown, shown.add_task(text, total=None))
