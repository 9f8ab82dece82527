"""The two generating endpoints over HTTP, as a bare ASGI application: little work per token, and a client that leaves
or stops reading is noticed at once, or after `write_stall_s`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from isthmus_ingress.exchange import Exchange
from isthmus_ingress.frontend import Frontend
from isthmus_ingress.http_wire import (
    ABORT,
    Receive,
    Scope,
    Send,
    check_json,
    header,
    read_body,
    send_error,
    send_error_early,
    send_json,
)
from isthmus_ingress.openai.body import parse_object
from isthmus_ingress.openai.errors import error_event
from isthmus_ingress.openai.render import to_json
from isthmus_ingress.outbox import Outbox
from isthmus_ingress.tenants import Tenant
from isthmus_shared.errors import Cancelled, IsthmusError
from isthmus_shared.tracing import HEADER

TRACEPARENT = HEADER.encode()
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    max_body_bytes: int
    body_timeout_s: float
    write_stall_s: float


class GenerateEndpoint:
    def __init__(self, frontend: Frontend, limits: HttpLimits, *, chat: bool) -> None:
        self._frontend, self._limits, self._chat = frontend, limits, chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send, request_id: str, tenant: Tenant) -> None:
        received_s = asyncio.get_running_loop().time()
        headers = {"x-request-id": request_id}
        body = b""
        try:
            check_json(scope)
            limits = self._limits
            body = await read_body(scope, receive, limit_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s)
        except Cancelled:
            return
        except IsthmusError as error:
            self._frontend.refused(error)
            await send_error_early(send, receive, error, headers)
            return
        try:
            with self._frontend.guarded(request_id):
                prepared = await self._frontend.prepare(parse_object(body), chat=self._chat, tenant=tenant)
        except IsthmusError as error:
            self._frontend.refused(error)
            await send_error(send, error, headers)
            return
        try:
            parent = header(scope, TRACEPARENT)
            with self._frontend.exchange(prepared, received_s=received_s, traceparent=parent) as exchange:
                told = {**headers, **self._frontend.limit_headers(tenant)}
                await self._answer(exchange, scope, receive, send, request_id, told)
        except Cancelled:
            pass  # there is nobody to tell
        except IsthmusError as error:
            await send_error(send, error, {**headers, **self._frontend.limit_headers(tenant)})

    async def _answer(
        self,
        exchange: Exchange,
        scope: Scope,
        receive: Receive,
        send: Send,
        request_id: str,
        headers: dict[str, str],
    ) -> None:
        """Raises the request's error while nothing of the answer has left; once something has, tells it itself."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_watch(receive, exchange.outbox))
            guard = _StallGuard(scope, exchange.outbox, self._limits.write_stall_s)
            failed: IsthmusError | None = None
            try:
                if exchange.prepared.stream:
                    await self._stream(exchange, guard, send, request_id, headers)
                else:
                    with self._frontend.guarded(request_id, exchange):
                        data = to_json(await self._frontend.whole(exchange, request_id)).encode()
                    guard.writing()
                    await send_json(send, 200, data, headers)
            except IsthmusError as error:
                failed = error  # not through the group, which would wrap it
            finally:
                guard.stop()
                if guard.cut:
                    await watching  # until the connection's end is known
                watching.cancel()
        if failed is not None:
            raise failed

    async def _stream(
        self, exchange: Exchange, guard: _StallGuard, send: Send, request_id: str, headers: dict[str, str]
    ) -> None:
        begun = False
        try:
            with self._frontend.guarded(request_id, exchange):
                async for batch in self._frontend.streamer(exchange, request_id).batches():
                    guard.writing()
                    if not begun:
                        begun = True
                        raw = [*_STREAM_HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
                        await send({"type": "http.response.start", "status": 200, "headers": raw})
                    await send({"type": "http.response.body", "body": batch, "more_body": True})
                    guard.written()
        except IsthmusError as error:
            if not begun or isinstance(error, Cancelled):
                raise
            guard.writing()
            await send({"type": "http.response.body", "body": error_event(error), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        guard.writing()
        await send({"type": "http.response.body", "body": b""})


async def _watch(receive: Receive, outbox: Outbox) -> None:
    """Close the outbox when the client leaves."""
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            outbox.close()
            return


class _StallGuard:
    """Drops the connection of a client that takes no bytes. Costs a write one clock reading; one timer runs."""

    def __init__(self, scope: Scope, outbox: Outbox, stall_s: float) -> None:
        self._abort = scope.get("extensions", {}).get(ABORT, {}).get("call")
        self._outbox, self._stall_s = outbox, stall_s
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None
        self._timer = self._loop.call_later(stall_s, self._look)
        self.cut = False

    def writing(self) -> None:
        self._since_s = self._loop.time()

    def written(self) -> None:
        self._since_s = None

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._since_s is None else self._since_s) + self._stall_s
        if due_s > now_s:
            self._timer = self._loop.call_at(due_s, self._look)
            return
        self.cut = True
        self._outbox.close()
        if self._abort is not None:
            self._abort()
