"""How a process shows the bus who it is: a URL with user and password, or an nkey; and TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from isthmus_shared.bus.syntax import INBOX
from isthmus_shared.errors import ConfigInvalid


@dataclass(frozen=True, slots=True)
class BusLogin:
    """Beside the URL. `nkey` is the seed (``SU…``) of the user that the URL names; `ca`, `cert` and `key` are PEM
    files: the authority of the server's certificate, and a certificate of our own where the server asks for one."""

    nkey: str | None = field(default=None, repr=False)
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


NO_LOGIN = BusLogin()


@dataclass(frozen=True, slots=True)
class Dialling:
    """What the client is given. `encrypted`: nothing may be said to a server that offers no TLS."""

    url: str
    user: str
    """Empty: none, or a token."""
    inbox: str
    """Prefix of its inboxes."""
    encrypted: bool
    options: dict[str, Any] = field(repr=False)


def dialling(url: str, login: BusLogin) -> Dialling:
    """Raises `ConfigInvalid` for files that cannot be used, or TLS files for a server without."""
    parts = urlsplit(url)
    encrypted = parts.scheme == "tls"
    options: dict[str, Any] = {}
    if encrypted:
        options["tls"] = _context(login)
    elif login.ca is not None or login.cert is not None:
        raise ConfigInvalid(
            "the bus' URL is not one of TLS, but TLS files for it are set",
            todo="set ISTHMUS_NATS_URL to tls://…, or unset ISTHMUS_NATS_CA, _CERT and _KEY",
            param="ISTHMUS_NATS_URL",
        )
    user = (parts.username or "") if parts.password is not None or login.nkey is not None else ""
    if login.nkey is not None:
        url = _without_user(parts)
        options["nkeys_seed_str"] = login.nkey
        _check_nkey(login.nkey)
    return Dialling(url, user, f"{INBOX}.{user}" if user else INBOX, encrypted, options)


def shown(url: str) -> str:
    """Without user and password."""
    return _without_user(urlsplit(url))


def _without_user(parts: SplitResult) -> str:
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _check_nkey(seed: str) -> None:
    try:
        import nkeys
    except ImportError as error:
        raise ConfigInvalid(
            "nkeys cannot be used here",
            why="the Python package nkeys is not installed",
            todo="pip install 'isthmus[nkeys]', or use a password",
            param="ISTHMUS_NATS_NKEY",
        ) from error
    try:
        nkeys.from_seed(bytearray(seed.strip().encode())).wipe()
    except (nkeys.NkeysError, ValueError, IndexError):
        raise ConfigInvalid(
            "ISTHMUS_NATS_NKEY is no seed of an nkey", why="one begins with SU", param="ISTHMUS_NATS_NKEY"
        ) from None


def _context(login: BusLogin) -> ssl.SSLContext:
    if (login.cert is None) != (login.key is None):
        raise ConfigInvalid("ISTHMUS_NATS_CERT and ISTHMUS_NATS_KEY go together", param="ISTHMUS_NATS_CERT")
    try:
        context = ssl.create_default_context(cafile=login.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2  # what managed servers still offer
        if login.cert is not None and login.key is not None:
            context.load_cert_chain(login.cert, login.key)
    except OSError as error:  # ssl.SSLError too
        why = f"{login.ca}, {login.cert}, {login.key}: {error.strerror or error}"
        raise ConfigInvalid(
            "ISTHMUS_NATS_CA, _CERT or _KEY cannot be used", why=why, param="ISTHMUS_NATS_CA"
        ) from error
    return context
