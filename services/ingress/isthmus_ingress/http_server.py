"""The HTTP server: connections, the tasks that answer them, and an end in order."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from email.utils import formatdate

import structlog

from isthmus_ingress.http_connection import Connection, ConnectionLimits
from isthmus_ingress.http_exchange import WIRE, HttpExchange, Receive, Scope, Send
from isthmus_ingress.openai.errors import error_json
from isthmus_shared.errors import ConfigInvalid, IsthmusError

App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEEP_ALIVE_S = 65.0
"""An idle connection; longer than the 60 s of common load balancers, so that they close first."""
HEAD_TIMEOUT_S = 30.0
"""From a connection's opening, or a request's first byte, to the end of its head; a head is one packet or two."""
WRITE_STALL_S = 30.0
"""A client that takes no bytes for so long is cut off."""
MAX_CONNECTIONS = 8192
OWN_FILES = 64
"""File descriptors that are not clients': the bus, health pages, the event loop's."""
BACKLOG = 2048
_FAILED = IsthmusError("this server failed on the request", todo="tell its operator when it happened")


class ApiServer:
    """Serves an ASGI application (HTTP alone) until told to stop."""

    def __init__(
        self,
        app: App,
        *,
        grace_s: float,
        head_timeout_s: float = HEAD_TIMEOUT_S,
        keep_alive_s: float = KEEP_ALIVE_S,
        write_stall_s: float = WRITE_STALL_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.limits = ConnectionLimits(head_timeout_s, keep_alive_s, write_stall_s)
        self._max_connections = max_connections
        self.stopping = False
        self._app, self._grace_s = app, grace_s
        self.log = structlog.get_logger()
        self.connections: dict[Connection, None] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._stop, self._quiet = asyncio.Event(), asyncio.Event()
        self._quiet.set()
        self._date, self._date_s = b"", 0

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Until `stop`; what has begun by then has `grace_s` to end."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as self._tasks:
            servers = [await loop.create_server(lambda: Connection(self), sock=each) for each in sockets]
            try:
                await self._stop.wait()
            finally:
                for server in servers:
                    server.close()
            for connection in list(self.connections):
                connection.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._grace_s):
                    await self._quiet.wait()
            for task in list(self._answering):
                task.cancel()
            for connection in list(self.connections):
                connection.abort()

    def stop(self) -> None:
        """No new connections; requests that have come may end."""
        self.stopping = True
        self._stop.set()

    # -- what connections ask (`http_connection.Host`) -----------------------------------------------------------------

    @property
    def date(self) -> bytes:
        """The header's line, renewed once a second."""
        now_s = int(time.time())  # a calendar time, told to clients
        if now_s != self._date_s:
            self._date, self._date_s = f"date: {formatdate(now_s, usegmt=True)}\r\n".encode(), now_s
        return self._date

    def full(self) -> bool:
        return len(self.connections) >= self._max_connections

    def opened(self, connection: Connection) -> None:
        self.connections[connection] = None
        self._quiet.clear()

    def closed(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        if not self.connections:
            self._quiet.set()

    def serve_one(self, exchange: HttpExchange) -> None:
        task = self._tasks.create_task(self._answer(exchange))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, exchange: HttpExchange) -> None:
        try:
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except Exception:  # a bug of the application's ends its own request
            self.log.exception("http.application_failed", path=exchange.scope["path"])
        finally:
            if not exchange.complete:
                self._give_up(exchange)
            exchange.scope.pop(WIRE, None)  # else the two hold each other until somebody looks for such cycles

    def _give_up(self, exchange: HttpExchange) -> None:
        """The application has left its answer undone."""
        if exchange.begun or not exchange.connected:
            exchange.abort()
            return
        body = error_json(_FAILED)
        exchange.refuse_to_stay()
        exchange.start(500, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])
        exchange.write(body)
        exchange.finish()


def connections_possible(wanted: int) -> int:
    """As many, or as this process may have files for, once its soft limit is raised as far as it may be: beyond that,
    `accept` would fail, and clients would wait for nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - OWN_FILES))


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; `shared`: with others that share it too, among whom the kernel spreads connections. Raises
    `ConfigInvalid` when the address can't be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        why = error.strerror or str(error)
        todo = "set ISTHMUS_INGRESS_HOST and ISTHMUS_INGRESS_PORT (0 takes a free port)"
        raise ConfigInvalid(
            f"cannot listen on {host}:{port}", why=why, todo=todo, param="ISTHMUS_INGRESS_PORT"
        ) from error
    return listener
