"""Runs a command that dies with its supervisor: ``python leash.py SUPERVISOR_PID COMMAND...``.

Executed as a file, so that it imports nothing but what it needs. The kernel's parent-death signal survives the exec; it
is set here, in the child's own single thread, rather than between fork and exec, where little is safe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    supervisor, command = int(argv[0]), argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != supervisor:  # it died before the line above
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
