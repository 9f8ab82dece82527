from __future__ import annotations

import socket

import pytest

from isthmus_cli.ports import claim_port
from isthmus_shared.errors import ConfigInvalid


@pytest.mark.parametrize("reuse", [0, 1])
def test_a_port_on_which_somebody_listens_is_refused_with_the_way_out(reuse: int) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigInvalid, match=rf"port {port} on 127\.0\.0\.1 is taken.*--port"):
            claim_port("127.0.0.1", port)


def test_zero_gives_a_port_that_can_be_had() -> None:
    port = claim_port("127.0.0.1", 0)
    assert claim_port("127.0.0.1", port) == port


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigInvalid, match="no such host"):
        claim_port("no such host", 0)
