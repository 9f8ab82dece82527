"""What a person before a terminal sees while something takes its time, and what a file does not."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from isthmus_cli.progress import working
from isthmus_cli.reporter import TerminalReporter


def terminal() -> tuple[Console, io.StringIO]:
    screen = io.StringIO()
    return Console(file=screen, force_terminal=True, width=120, color_system=None), screen


def test_a_terminal_shows_the_step_and_what_is_left_and_keeps_notes() -> None:
    console, screen = terminal()
    with working("beginning", console) as shown:
        shown.step("a → b [1]", 1, 4)
        shown.note("a line that stays [2]")
    text = screen.getvalue()
    assert "a → b [1]" in text
    assert "a line that stays [2]\n" in text
    assert text.endswith("\x1b[2K"), "the bar is wiped at the end"


def test_a_file_gets_only_notes() -> None:
    file = io.StringIO()
    with working("beginning", Console(file=file, width=120)) as shown:
        shown.step("a → b", 1, 4)
        shown.note("round 1")
    assert file.getvalue() == "round 1\n"


@pytest.mark.parametrize("end", ["ready", "stopping", "failed"])
def test_what_up_waits_for_is_shown_until_it_ends(end: str) -> None:
    console, screen = terminal()
    reporter = TerminalReporter(console)
    reporter.waiting("0 s, still waiting for decode-b" + 20 * ", another")
    reporter.waiting("1 s, still waiting for decode-b" + 20 * ", another")
    reporter.say("process.ready", "prefill-a is ready")  # which draws the last line anew
    assert "1 s, still waiting for decode-b" in screen.getvalue()
    assert len(screen.getvalue().rpartition("\n")[2]) <= 120, "one line, however many are waited for"
    reporter.say(end, "the end")
    at_end = len(screen.getvalue())
    assert screen.getvalue()[:at_end].endswith("the end\n")
    console.print("next")
    assert "waiting" not in screen.getvalue()[at_end:], "nothing is drawn any more"


def test_what_up_waits_for_is_not_written_to_a_file() -> None:
    file = io.StringIO()
    reporter = TerminalReporter(Console(file=file, width=120))
    reporter.waiting("still waiting")
    reporter.say("ready", "it is")
    assert file.getvalue() == "✓ it is\n"
