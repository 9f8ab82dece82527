"""TLS of the HTTP door."""

from __future__ import annotations

import ssl
from pathlib import Path

from isthmus_shared.errors import ConfigInvalid

SHUTDOWN_TIMEOUT_S = 5.0
"""For a client to answer that its connection ends; then it ends."""


def server_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """TLS 1.2 and later with that certificate; None without one. Raises `ConfigInvalid`."""
    if cert is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        for path in (cert, key):
            path.open("rb").close()  # the error below does not say which of the two it is about
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        named = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        raise ConfigInvalid(
            "the ingress' TLS certificate cannot be used",
            why=f"{(isinstance(error, OSError) and error.strerror) or error}{named}",
            todo="give a PEM certificate with its chain, and its key, not encrypted",
            param="ISTHMUS_INGRESS_TLS_CERT",
        ) from None
    return context


def _no_password() -> str:
    """Else OpenSSL would ask whoever sits at the terminal."""
    raise ValueError("the key is encrypted")
