"""Lanes whose connections come one by one."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field


@dataclass(slots=True)
class Joining:
    """An accepted lane some of whose streams are still to come."""

    streams: int
    timer: asyncio.TimerHandle
    sockets: dict[int, socket.socket] = field(default_factory=dict)

    def discard(self) -> None:
        self.timer.cancel()
        for sock in self.sockets.values():
            sock.close()
