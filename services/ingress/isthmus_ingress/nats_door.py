"""The same API over NATS request/reply, for callers that are on the bus anyway.

A request's body is JSON, or msgpack when its header `content-type` says so; the answer comes in the same format. With
`stream: true` the reply inbox gets one message per batch of chunks: `isthmus-seq` counts them from 0, and the last
one carries `isthmus-end: true`. A chunk message is a JSON (or msgpack) list of chunk objects. An error is OpenAI's
error object with its HTTP status in `isthmus-status`, and is always the last message. Where the server has API keys,
the header `authorization` brings one, as over HTTP.

There is no connection to lose, so a caller that wants to stop early names a subject in `isthmus-cancel`, of the form
``isthmus.v1.api.cancel.<its bus user>.<an id>``, and publishes anything to it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import msgpack

from isthmus_ingress.exchange import Exchange
from isthmus_ingress.frontend import Frontend
from isthmus_ingress.openai.body import check_tree, parse_object
from isthmus_ingress.openai.errors import BODY, error_body, error_headers
from isthmus_ingress.openai.render import DONE, to_json
from isthmus_ingress.prepare import Prepared
from isthmus_ingress.slo import HEADER as SLO_HEADER
from isthmus_ingress.slo import with_header
from isthmus_shared.bus.port import Bus, BusMessage
from isthmus_shared.bus.subscribing import subscribed
from isthmus_shared.bus.syntax import check_subject, is_inbox, matches
from isthmus_shared.errors import Cancelled, InvalidRequest, IsthmusError, PayloadTooLarge, ProtocolViolation
from isthmus_shared.ids import new_id
from isthmus_shared.messages import subjects
from isthmus_shared.messages.base import unpack_map
from isthmus_shared.micro import Endpoint
from isthmus_shared.service import ServiceRuntime
from isthmus_shared.tracing import HEADER

CONTENT_TYPE, SEQ, END, STATUS, CANCEL = (
    "content-type",
    "isthmus-seq",
    "isthmus-end",
    "isthmus-status",
    "isthmus-cancel",
)
JSON, MSGPACK = "application/json", "application/msgpack"
AUTHORIZATION = "authorization"
MAX_PENDING = 1024
"""Requests not yet looked at; the in-flight limit refuses long before."""
_EVENT_HEAD = b"data: "


class NatsDoor:
    def __init__(self, runtime: ServiceRuntime[Any], frontend: Frontend, *, max_body_bytes: int) -> None:
        self._runtime, self._bus, self._log = runtime, runtime.bus, runtime.log
        self._frontend, self._max_body_bytes = frontend, max_body_bytes

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._serve("chat", subjects.API_CHAT))
            tasks.create_task(self._serve("completions", subjects.API_COMPLETIONS))
            tasks.create_task(self._serve("models", subjects.API_MODELS))

    async def _serve(self, name: str, subject: str) -> None:
        with self._runtime.serving(name, subject, subjects.API_QUEUE) as endpoint:
            await self._answer_all(subject, endpoint)

    async def _answer_all(self, subject: str, endpoint: Endpoint) -> None:
        async with (
            subscribed(self._bus, subject, queue=subjects.API_QUEUE, max_pending=MAX_PENDING) as requests,
            asyncio.TaskGroup() as tasks,
        ):
            async for message in requests:
                if message.reply is not None and is_inbox(message.reply):  # else there is nobody to answer
                    tasks.create_task(self._handle(message, message.reply, endpoint))

    async def _handle(self, message: BusMessage, inbox: str, endpoint: Endpoint) -> None:
        loop = asyncio.get_running_loop()
        received_s = loop.time()
        error = await self._outcome(message, inbox, received_s)
        endpoint.record(loop.time() - received_s, error)

    async def _outcome(self, message: BusMessage, inbox: str, received_s: float) -> IsthmusError | None:
        """Answer it; returns the error that it was answered with."""
        reply, request_id = _Reply(self._bus, inbox, _format(message)), new_id("req")
        try:
            tenant = self._frontend.keyring.tenant_of(message.headers.get(AUTHORIZATION))
            if message.subject == subjects.API_MODELS:
                await reply.last({"object": "list", "data": self._frontend.models()})
                return None
            try:
                with self._frontend.guarded(request_id), self._frontend.bodies.share() as take:
                    take(len(message.data))
                    body = self._body(message, reply.format)
                    if (cancel := message.headers.get(CANCEL)) is not None:
                        _check_cancel(cancel)
                    chat = message.subject == subjects.API_CHAT
                    asked = with_header(body, message.headers.get(SLO_HEADER))
                    prepared = await self._frontend.prepare(asked, chat=chat, tenant=tenant)
            except IsthmusError as error:
                self._frontend.refused(error)
                raise
            parent = message.headers.get(HEADER)
            with self._frontend.exchange(prepared, request_id, received_s=received_s, traceparent=parent) as exchange:
                await self._answer(exchange, prepared, cancel, reply, request_id)
        except Cancelled as error:
            self._log.info("nats.cancelled", error=error.text)
        except IsthmusError as error:
            await self._tell(reply, error)
            return error
        return None

    def _body(self, message: BusMessage, format: str) -> Mapping[str, Any]:
        if len(message.data) > self._max_body_bytes:
            raise PayloadTooLarge("the body is too large", why=f"{self._max_body_bytes} bytes are allowed", param=BODY)
        if format == JSON:
            return parse_object(message.data)
        try:
            fields = unpack_map(message.data, what="the body")
        except ProtocolViolation as error:
            raise InvalidRequest("the body is not a msgpack map", why=error.what, param=BODY) from error
        check_tree(fields)
        return fields

    async def _answer(
        self, exchange: Exchange, prepared: Prepared, cancel: str | None, reply: _Reply, request_id: str
    ) -> None:
        failed: IsthmusError | None = None
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch(cancel, exchange)) if cancel else None
            try:
                with self._frontend.guarded(request_id, exchange):
                    if not prepared.stream:
                        await reply.last(await self._frontend.whole(exchange, request_id))
                    else:
                        async for batch in self._frontend.streamer(exchange, request_id).batches():
                            await reply.chunks(batch)
            except IsthmusError as error:
                failed = error  # not through the group, which would wrap it
            finally:
                if watching is not None:
                    watching.cancel()
        if failed is not None:
            raise failed

    async def _watch(self, subject: str, exchange: Exchange) -> None:
        async with subscribed(self._bus, subject, max_pending=1) as said:
            async for _ in said:
                exchange.outbox.close()
                return

    async def _tell(self, reply: _Reply, error: IsthmusError) -> None:
        try:
            await reply.last(error_body(error), {STATUS: str(error.http_status), **error_headers(error)})
        except IsthmusError as lost:
            self._log.warning("nats.answer_lost", code=lost.code, error=lost.text)


def _check_cancel(subject: str) -> None:
    try:
        check_subject(subject, wildcards=False)
    except InvalidRequest as error:
        raise InvalidRequest(f"{CANCEL} is {error.what}", why=error.why, param=CANCEL) from error
    if not matches(subjects.API_CANCEL, subject):
        why, todo = (
            f"it is not of the form {subjects.API_CANCEL}",
            f"name {subjects.api_cancel('<your name>', '<an id>')}",
        )
        raise InvalidRequest(f"{CANCEL} is a subject of something else", why=why, todo=todo, param=CANCEL)


def _format(message: BusMessage) -> str:
    kind = message.headers.get(CONTENT_TYPE, "").split(";", 1)[0].strip().lower()
    if kind in (MSGPACK, "application/x-msgpack", "application/vnd.msgpack"):
        return MSGPACK
    return JSON


class _Reply:
    """The caller's inbox: messages in order, in its format."""

    def __init__(self, bus: Bus, inbox: str, format: str) -> None:
        self._bus, self._inbox, self.format = bus, inbox, format
        self._seq = 0

    async def chunks(self, batch: bytes) -> None:
        """A batch of server-sent events as a list of chunk objects."""
        events = [event.removeprefix(_EVENT_HEAD) for event in batch.split(b"\n\n") if event]
        ended = bool(events) and events[-1] == DONE.removeprefix(_EVENT_HEAD).strip()
        chunks = events[:-1] if ended else events
        if self.format == JSON:
            data = b"[" + b",".join(chunks) + b"]"
        else:
            data = msgpack.packb([json.loads(chunk) for chunk in chunks])
        await self._send(data, {END: "true"} if ended else {})

    async def last(self, answer: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        data = to_json(answer).encode() if self.format == JSON else msgpack.packb(answer)
        await self._send(data, {END: "true", **(headers or {})})

    async def _send(self, data: bytes, headers: Mapping[str, str]) -> None:
        told = {CONTENT_TYPE: self.format, SEQ: str(self._seq), **headers}
        self._seq += 1
        await self._bus.publish(self._inbox, data, headers=told)
