"""Options of a lane's sockets."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

UNPACED = b"reno"
"""The congestion control that every kernel has, and lets anybody choose unless its administrator has said otherwise."""


def tune(sock: socket.socket, host: str) -> None:
    """Before it is connected, or as soon as it is accepted. `host`: the peer's, as numbers. Raises `OSError`.

    Buffer sizes are the kernel's to choose: it grows them with the path, while a size that is set stays. So is the
    congestion control, except within this machine, where nothing is congested: the one that does not pace (ADR 4).
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        with contextlib.suppress(OSError):  # net.ipv4.tcp_allowed_congestion_control: then it is the host's, and slower
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)
