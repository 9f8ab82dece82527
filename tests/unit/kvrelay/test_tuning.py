from __future__ import annotations

import socket
from typing import Any

import pytest

from isthmus_kvrelay.transports.tuning import UNPACED, tune


@pytest.mark.parametrize(
    ("host", "unpaced"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("192.0.2.1", False), ("fe80::1%eth0", False)],
)
def test_only_lanes_within_this_machine_leave_the_hosts_congestion_control(host: str, unpaced: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        hosts_own = _congestion(sock)
        tune(sock, host)
        assert _congestion(sock) == (UNPACED if unpaced else hosts_own)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


class Restricted(socket.socket):
    """Where the administrator lets nobody choose a congestion control."""

    def setsockopt(self, level: int, name: int, *value: Any) -> None:
        if name == socket.TCP_CONGESTION:
            raise PermissionError(1, "Operation not permitted")
        super().setsockopt(level, name, *value)


def test_where_the_congestion_control_may_not_be_chosen_the_hosts_own_stays() -> None:
    with Restricted(socket.AF_INET, socket.SOCK_STREAM) as sock:
        tune(sock, "127.0.0.1")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def _congestion(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
