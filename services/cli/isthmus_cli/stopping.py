"""Telling another process to end, and waiting for it."""

from __future__ import annotations

import os
import select
import signal


def wait_until_gone(pid: int, number: signal.Signals, *, timeout_s: float) -> bool:
    """Sends the signal and waits; whether the process ended. Raises `ProcessLookupError` when there is none.

    The handle is taken before the signal is sent, so that neither can reach a later process of the same number.
    """
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, number)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(handle)
