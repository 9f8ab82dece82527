"""Exit codes of the isthmus command, also in its --help and in docs/cli.md."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    meaning: str

    OK = 0, "done; `status --watch` that was left with Ctrl-C"
    FAILED = 1, "a request was refused or failed, a check found an error, a statement is not met"
    INVALID = 2, "wrong usage, setting, cluster file or input, or the port is taken"
    NOT_STARTED = 3, "a process did not become ready, or crashed again and again"
    NO_CLUSTER = 4, "no cluster runs with that state folder, or it does not answer"
    KILLED = 130, "Ctrl-C while something was computed, or a second one while processes stopped"

    def __new__(cls, code: int, meaning: str) -> Exit:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member


EPILOG = "Exit codes: " + "; ".join(f"{code.value} {code.meaning.replace('`', '')}" for code in Exit) + "."
