"""The command's own connection to a bus: as its environment says, where it is not one of `isthmus up`'s own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from isthmus_shared.bus.login import NO_LOGIN, BusLogin
from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.config import FILE_SUFFIX, ServiceConfig

BUS_SETTINGS = ("ISTHMUS_NATS_CA", "ISTHMUS_NATS_CERT", "ISTHMUS_NATS_KEY", "ISTHMUS_NATS_NKEY")


def bus_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of them, or of their files, that are set."""
    names = {*BUS_SETTINGS, *(name + FILE_SUFFIX for name in BUS_SETTINGS)}
    return {name: value for name, value in environ.items() if name in names}


def login_for(url: str, environ: Mapping[str, str]) -> BusLogin:
    """None beside the URL where it has a password and no TLS, as that of a local cluster's own server. Raises
    `ConfigInvalid`."""
    parts = urlsplit(url)
    if parts.scheme == "nats" and parts.password is not None:
        return NO_LOGIN
    return ServiceConfig.load(bus_settings(environ)).bus_login


async def dial(url: str, *, name: str, timeout_s: float = 30.0) -> NatsBus:
    return await NatsBus.connect(url, name=name, login=login_for(url, os.environ), timeout_s=timeout_s)
