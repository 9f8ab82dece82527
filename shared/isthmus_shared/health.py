"""The HTTP side of every process: /health, /live, /ready, /metrics. Small enough to need no web framework."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from isthmus_shared.errors import ConfigInvalid

MAX_HEADER_BYTES = 8192
"""A probe's or scraper's request is a few hundred bytes."""
READ_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
"""Kubelet and Prometheus use one or two; more than this at once is a mistake or an attack."""


@dataclass(frozen=True, slots=True)
class Page:
    status: int
    content_type: str
    body: bytes

    @classmethod
    def json(cls, status: int, fields: Mapping[str, Any]) -> Self:
        return cls(status, "application/json", json.dumps(fields).encode() + b"\n")


_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class HealthServer:
    """Serves `pages` (path → function that makes the page now) on `host:port`; port 0 takes a free one."""

    def __init__(self, pages: Mapping[str, Callable[[], Page]], *, host: str, port: int) -> None:
        self._pages, self._host, self._port = pages, host, port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """`ConfigInvalid` if the address cannot be had."""
        try:
            self._server = await asyncio.start_server(self._connected, self._host, self._port, limit=MAX_HEADER_BYTES)
        except OSError as error:
            raise ConfigInvalid(
                f"cannot listen on {self._host}:{self._port}",
                why=error.strerror or str(error),
                todo="set ISTHMUS_HTTP_HOST and ISTHMUS_HTTP_PORT (0 takes a free port)",
                param="ISTHMUS_HTTP_PORT",
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        await self._server.wait_closed()

    @property
    def address(self) -> str:
        assert self._server is not None, "enter the server as a context first"
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                page, with_body = await self._answer(reader)
                writer.write(_head(page) + (page.body if with_body else b""))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # it left, or never asked
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[Page, bool]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return Page.json(400, {"error": f"more than {MAX_HEADER_BYTES} bytes of headers"}), True
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return Page.json(400, {"error": "not an HTTP/1 request"}), True
        if words[0] not in (b"GET", b"HEAD"):
            return Page.json(405, {"error": "only GET and HEAD"}), True
        make = self._pages.get(words[1].split(b"?", 1)[0].decode("latin-1"))
        page = Page.json(404, {"error": "no such page", "pages": sorted(self._pages)}) if make is None else make()
        return page, words[0] == b"GET"


def _head(page: Page) -> bytes:
    lines = (
        f"HTTP/1.1 {page.status} {_REASONS[page.status]}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Cache-Control: no-store",
        "Connection: close",
        "",
        "",
    )
    return "\r\n".join(lines).encode("latin-1")
