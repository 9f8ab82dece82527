"""The bus of a local cluster: the user's own server, or one that is kept alive here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from isthmus_cli.bus_users import url_for
from isthmus_cli.child import BACKOFF_MAX_S, BACKOFF_MIN_S, LIVED_WELL_S, MAX_QUICK_CRASHES, tail
from isthmus_cli.dialling import dial
from isthmus_shared.bus.login import shown
from isthmus_shared.bus.server import EmbeddedNats
from isthmus_shared.bus.server_config import BusUser, accounts
from isthmus_shared.errors import ConfigInvalid, Unavailable

FOUND_S = 5.0
"""For a server that is there to take a connection; milliseconds, as a rule."""

Changed = Callable[[str, int | None], None]


class Keeper:
    """With a server of our own: `keep` restarts it on its port when it dies. With the user's: does nothing."""

    def __init__(
        self,
        url: str,
        server: EmbeddedNats | None,
        log_path: Path,
        changed: Changed,
        users: Mapping[str, BusUser] = MappingProxyType({}),
    ) -> None:
        self.log_path = log_path
        self._url, self._users = url, users
        self.restarts = 0
        self._server, self._changed = server, changed

    @property
    def url(self) -> str:
        """Fit to be shown."""
        return shown(self._url)

    def url_of(self, name: str) -> str:
        """For that process, with its own user and password where the server is ours."""
        return url_for(self._url, self._users.get(name))

    @property
    def pid(self) -> int | None:
        return None if self._server is None else self._server.pid

    async def keep(self) -> None:
        if self._server is None:
            return
        loop, quick_crashes = asyncio.get_running_loop(), 0
        self._changed("started", self.pid)
        while True:
            began_s = loop.time()
            await _ended(self.pid)
            self._changed("ended", None)
            quick_crashes = 1 if loop.time() - began_s >= LIVED_WELL_S else quick_crashes + 1
            if quick_crashes > MAX_QUICK_CRASHES:
                raise Unavailable("nats-server ends again and again", why=tail(self.log_path), todo="see its log")
            await asyncio.sleep(min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** (quick_crashes - 1)))
            await self._server.restart()
            self.restarts += 1
            self._changed("started", self.pid)


def checked(url: str) -> str:
    """The user's own URL. Raises `ConfigInvalid` when it can be no server's."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("nats", "tls") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        valid = False
    if not valid:
        raise ConfigInvalid(
            "NATS_URL names no NATS server",
            todo="give nats://[user:password@]host:port or tls://…, or unset it to have a server started",
            param="NATS_URL",
        )
    return url


@asynccontextmanager
async def bus(url: str | None, log_path: Path, changed: Changed, users: Mapping[str, BusUser]) -> AsyncIterator[Keeper]:
    """Our own server, for those users, unless `url` names one; it is stopped when the context is left.

    Raises `ConfigInvalid` or `BusDisconnected` when there is no server at `url`.
    """
    if url is not None:
        probe = await dial(checked(url), name="isthmus up", timeout_s=FOUND_S)
        await probe.close()
        yield Keeper(url, None, log_path, changed)
        return
    settings = accounts(list(users.values()), jetstream=True)
    async with EmbeddedNats(log_path=log_path, settings=settings) as server:
        yield Keeper(server.url, server, log_path, changed, users)


async def _ended(pid: int | None) -> None:
    """Until that child process has ended, whoever reaps it."""
    if pid is None:
        return
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
