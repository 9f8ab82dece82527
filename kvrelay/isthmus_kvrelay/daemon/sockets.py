"""The unix socket at which clients find the relay."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

from isthmus_shared.errors import ConfigInvalid

_CREDENTIALS = struct.Struct("3i")
MAX_PATH_BYTES = 105
"""Linux's 107, less the two characters of the name that is bound first."""
BACKLOG = 64


def listen_at(path: Path) -> socket.socket:
    """A listening socket of mode 0600 at `path`. A dead relay's is replaced; a living one's never.

    Bound under another name and moved into place, so that `path` never shows a socket that is not ready.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigInvalid(f"the socket path {path} is longer than {MAX_PATH_BYTES} bytes", param="socket")
    _refuse_living(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    first = path.with_name(path.name + "~")
    first.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(first))
        first.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        first.rename(path)
    except OSError as error:
        listener.close()
        raise ConfigInvalid(f"cannot listen at {path}: {error}", param="socket") from error
    return listener


def _refuse_living(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigInvalid(f"{path} exists and is no socket", todo="name another path", param="socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return  # nobody listens: what a killed relay left
    raise ConfigInvalid(f"another relay listens at {path}", todo="stop it, or name another path", param="socket")


def inode_of(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return None


def peer_uid(sock: socket.socket) -> int:
    """The user of the process at the other end, as the kernel says."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid
