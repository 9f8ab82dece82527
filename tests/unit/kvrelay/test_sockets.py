from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from isthmus_kvrelay.daemon.sockets import listen_at, peer_uid
from isthmus_shared.errors import ConfigInvalid


def test_the_socket_is_for_its_owner_only_and_says_who_connects(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "relay.sock"
    with listen_at(path) as listener, socket.socket(socket.AF_UNIX) as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        client.connect(str(path))
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert peer_uid(accepted) == os.geteuid()


def test_a_dead_relays_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "relay.sock"
    listen_at(path).close()
    assert path.exists()
    with listen_at(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_living_relays_socket_is_not(tmp_path: Path) -> None:
    path = tmp_path / "relay.sock"
    with listen_at(path), pytest.raises(ConfigInvalid, match="another relay"):
        listen_at(path)


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "relay.sock"
    path.write_text("precious")
    with pytest.raises(ConfigInvalid, match="no socket"):
        listen_at(path)
    assert path.read_text() == "precious"


def test_a_path_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="longer than"):
        listen_at(tmp_path / ("x" * 120))
