"""The endpoint's port, looked at before anything is started."""

from __future__ import annotations

import errno
import socket

from isthmus_shared.errors import ConfigInvalid


def claim_port(host: str, port: int) -> int:
    """The port to listen on: `port` if it can be had, or a free one for 0. Raises `ConfigInvalid` if it is taken."""
    family, _, _, _, address = _resolve(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will: TIME_WAIT does not count
        try:
            probe.bind(address)
            probe.listen(1)  # a bind alone succeeds beside a listener that set SO_REUSEADDR too
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise ConfigInvalid(
                f"port {port} on {host} is taken" if taken else f"cannot listen on {host}:{port}",
                why="another process listens there" if taken else (error.strerror or str(error)),
                todo="choose another with --port (0 takes a free one)",
                param="ingress.port",
            ) from error
        claimed: int = probe.getsockname()[1]
        return claimed


def _resolve(
    host: str, port: int
) -> tuple[
    socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigInvalid(
            f"host {host!r} is not an address of this machine", why=str(error), param="ingress.host"
        ) from error
