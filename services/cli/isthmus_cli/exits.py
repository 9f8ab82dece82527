"""Exit codes of the isthmus command, also in its --help."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    """A request was refused or failed."""
    INVALID = 2
    """Wrong usage, setting or cluster file; the port is taken."""
    NOT_STARTED = 3
    """A process did not become ready, or crashed again and again."""
    NO_CLUSTER = 4
    """No cluster runs with that state folder, or it does not answer."""
    KILLED = 130
    """A second Ctrl-C: processes were killed rather than stopped."""


EPILOG = (
    "Exit codes: 0 done; 1 a request failed; 2 wrong usage, setting, cluster file or port taken; 3 a process did not "
    "start or kept crashing; 4 no cluster is running there; 130 killed by a second Ctrl-C."
)
