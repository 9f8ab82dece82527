"""The two generating endpoints over HTTP, past the framework: little work per token, and a client that leaves is
noticed at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from isthmus_ingress.body_room import Take
from isthmus_ingress.exchange import Exchange
from isthmus_ingress.frontend import Frontend
from isthmus_ingress.http_exchange import HttpExchange
from isthmus_ingress.http_wire import check_json, header, read_body, send_error, send_error_early, send_json
from isthmus_ingress.openai.body import parse_object
from isthmus_ingress.openai.errors import error_event
from isthmus_ingress.openai.render import to_json
from isthmus_ingress.prepare import Prepared
from isthmus_ingress.slo import HEADER as SLO_HEADER
from isthmus_ingress.slo import with_header
from isthmus_ingress.tenants import Tenant
from isthmus_shared.errors import Cancelled, IsthmusError
from isthmus_shared.tracing import HEADER

TRACEPARENT = HEADER.encode()
SLO_CLASS = SLO_HEADER.encode()
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    max_body_bytes: int
    body_timeout_s: float


class GenerateEndpoint:
    def __init__(self, frontend: Frontend, limits: HttpLimits, *, chat: bool) -> None:
        self._frontend, self._limits, self._chat = frontend, limits, chat

    async def __call__(self, http: HttpExchange, request_id: str, tenant: Tenant) -> None:
        received_s = asyncio.get_running_loop().time()
        headers = {"x-request-id": request_id}
        prepared = await self._prepared(http, request_id, tenant, headers)
        if prepared is None:
            return
        try:
            parent = header(http.scope, TRACEPARENT)
            with self._frontend.exchange(prepared, request_id, received_s=received_s, traceparent=parent) as exchange:
                told = {**headers, **self._frontend.limit_headers(tenant)}
                await self._answer(exchange, http, request_id, told)
        except Cancelled:
            pass  # there is nobody to tell
        except IsthmusError as error:
            await send_error(http.send, error, {**headers, **self._frontend.limit_headers(tenant)})

    async def _prepared(
        self, http: HttpExchange, request_id: str, tenant: Tenant, headers: dict[str, str]
    ) -> Prepared | None:
        """None: it was refused, and told so, or the client has left. The body is held no longer than this takes."""
        with self._frontend.bodies.share() as take:
            try:
                check_json(http.scope)
                body = await self._body(http, take)
            except Cancelled:
                return None
            except IsthmusError as error:
                self._frontend.refused(error)
                await send_error_early(http.send, http.receive, error, headers)
                return None
            try:
                with self._frontend.guarded(request_id):
                    asked = with_header(parse_object(body), header(http.scope, SLO_CLASS))
                    return await self._frontend.prepare(asked, chat=self._chat, tenant=tenant)
            except IsthmusError as error:
                self._frontend.refused(error)
                await send_error(http.send, error, headers)
                return None

    async def _body(self, http: HttpExchange, take: Take) -> bytes:
        limits = self._limits
        body = http.take_body()
        if body is not None and len(body) <= limits.max_body_bytes:
            take(len(body))
            return body  # it came with the head, as small ones do
        return await read_body(
            http.scope, http.receive, take, limit_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s
        )

    async def _answer(self, exchange: Exchange, http: HttpExchange, request_id: str, headers: dict[str, str]) -> None:
        """Raises the request's error while nothing of the answer has left; once something has, tells it itself."""
        http.on_gone = exchange.outbox.close
        if not http.connected:
            raise Cancelled("the client left")
        try:
            if exchange.prepared.stream:
                await self._stream(exchange, http, request_id, headers)
                return
            with self._frontend.guarded(request_id, exchange):
                data = to_json(await self._frontend.whole(exchange, request_id)).encode()
            await send_json(http.send, 200, data, headers)
        finally:
            http.on_gone = None

    async def _stream(self, exchange: Exchange, http: HttpExchange, request_id: str, headers: dict[str, str]) -> None:
        try:
            with self._frontend.guarded(request_id, exchange):
                async for batch in self._frontend.streamer(exchange, request_id).batches():
                    if not http.begun:
                        named = ((name.encode(), value.encode()) for name, value in headers.items())
                        http.start(200, [*_STREAM_HEADERS, *named])
                    http.write(batch)
                    await http.drain()
        except IsthmusError as error:
            if not http.begun or isinstance(error, Cancelled):
                raise
            http.write(error_event(error))
        http.finish()
        await http.drain()
