"""nats-py's client, which says nothing to a server before the connection is as safe as was asked for."""

from __future__ import annotations

import nats.errors

from isthmus_shared.bus.direct import DirectClient
from isthmus_shared.bus.login import Dialling


class LoginClient(DirectClient):
    """nats-py goes on in the clear when a server does not ask for TLS, whatever the URL says: somebody in between could
    so have our password. This one says nothing then."""

    def __init__(self, to: Dialling) -> None:
        super().__init__()
        self._encrypted = to.encrypted

    def _connect_command(self) -> bytes:
        if self._encrypted and not self._server_info.get("tls_required"):
            raise nats.errors.Error("the server offers no TLS, which the bus' URL asks for")
        command: bytes = super()._connect_command()
        return command
