"""What both front doors do with a request before and after their own wire: admit, prepare, run, count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from isthmus_ingress.answers import Streamer, whole_answer
from isthmus_ingress.body_room import BodyRoom
from isthmus_ingress.driver import Deps
from isthmus_ingress.exchange import Exchange, Limits
from isthmus_ingress.hub import Hub
from isthmus_ingress.openai.errors import internal_error
from isthmus_ingress.openai.render import Identity
from isthmus_ingress.prepare import Prepared, Preparer
from isthmus_ingress.quotas import Quotas
from isthmus_ingress.tenants import Keyring, Tenant
from isthmus_shared.errors import Draining, InvalidRequest, IsthmusError, ModelNotFound
from isthmus_shared.tracing import checked


class Frontend:
    """`accepting` says whether new requests are welcome; what has begun goes on."""

    def __init__(
        self,
        preparer: Preparer,
        hub: Hub,
        deps: Deps,
        limits: Limits,
        accepting: Callable[[], bool],
        *,
        keyring: Keyring | None = None,
        bodies: BodyRoom | None = None,
    ) -> None:
        self.hub, self.preparer = hub, preparer
        self.keyring, self.bodies = keyring or Keyring(), bodies or BodyRoom()
        self._quotas = Quotas(self.keyring.quotas)
        self._now_s = asyncio.get_running_loop().time
        self._deps, self._limits, self._accepting = deps, limits, accepting
        self.idle = asyncio.Event()
        """Set while no request is in progress."""
        self.idle.set()
        self._active = 0
        self._started = int(time.time())  # a calendar time for `created`, not a clock for durations

    async def prepare(self, body: Mapping[str, Any], *, chat: bool, tenant: Tenant) -> Prepared:
        """Raises whatever is wrong with the request, or that nobody can serve it."""
        if not self._accepting():
            raise Draining("this ingress is going away", todo="try again")
        name = body.get("model")
        if name is not None and not isinstance(name, str):
            raise InvalidRequest("model is invalid", why="it must be text", param="model")
        model = self.hub.roster.model(name)
        return await (self.preparer.chat if chat else self.preparer.completion)(body, model, tenant)

    @contextmanager
    def exchange(
        self, prepared: Prepared, request_id: str, *, received_s: float, traceparent: str | None = None
    ) -> Iterator[Exchange]:
        """The request in progress; on any way out of the context nothing of it is left running. `request_id`: what its
        client knows it by."""
        text, parent = self.preparer.text(prepared.model.name), checked(traceparent)
        with self._counted(prepared) as meter:
            exchange = Exchange(
                prepared,
                text,
                self.hub,
                self._deps,
                self._limits,
                request_id=request_id,
                received_s=received_s,
                traceparent=parent,
                meter=meter,
            )
            with self._running(exchange):
                yield exchange

    @contextmanager
    def _counted(self, prepared: Prepared) -> Iterator[Callable[[int], None] | None]:
        """The request against its tenant's quota. Yields what takes the tokens that it generates, if they are limited.
        Raises `TooManyRequests`."""
        tenant, quotas, now_s = prepared.tenant, self._quotas, self._now_s
        quotas.begin(tenant, prepared.prompt_tokens, now_s=now_s())
        try:
            limited = quotas.limits_tokens(tenant)
            yield (lambda tokens: quotas.generated(tenant, tokens, now_s=now_s())) if limited else None
        finally:
            quotas.end(tenant)

    @contextmanager
    def _running(self, exchange: Exchange) -> Iterator[None]:
        self._active += 1
        self.idle.clear()
        exchange.start()
        try:
            yield
        finally:
            exchange.close()
            self._active -= 1
            if self._active == 0:
                self.idle.set()

    @contextmanager
    def guarded(self, request_id: str, exchange: Exchange | None = None) -> Iterator[None]:
        """A bug inside becomes an `internal_error` of this one request; what it was is logged."""
        try:
            yield
        except IsthmusError:
            raise
        except Exception as bug:
            error = internal_error(request_id)
            self._deps.log.exception("request.bug", request_id=request_id)
            if exchange is not None:
                exchange.outcome = error.code
            raise error from bug

    def refused(self, error: IsthmusError) -> None:
        """Count a request that never became an exchange."""
        self._deps.metrics.requests_rejected.labels(error.code).inc()

    def limit_headers(self, tenant: Tenant) -> dict[str, str]:
        """What is left of its quota, for the answer's head."""
        return self._quotas.headers(tenant, now_s=self._now_s())

    def identity(self, prepared: Prepared, request_id: str) -> Identity:
        prefix = "chatcmpl" if prepared.chat else "cmpl"
        return Identity(f"{prefix}-{request_id}", int(time.time()), prepared.model.name, prepared.chat)

    def streamer(self, exchange: Exchange, request_id: str) -> Streamer:
        prepared = exchange.prepared
        return Streamer(
            exchange, self.identity(prepared, request_id), self.preparer.text(prepared.model.name).tokenizer
        )

    async def whole(self, exchange: Exchange, request_id: str) -> dict[str, Any]:
        prepared = exchange.prepared
        identity = self.identity(prepared, request_id)
        return await whole_answer(exchange, identity, self.preparer.text(prepared.model.name).tokenizer)

    def models(self) -> list[dict[str, Any]]:
        """OpenAI's model objects, with vLLM's `max_model_len`."""
        return [
            {
                "id": model.name,
                "object": "model",
                "created": self._started,
                "owned_by": "isthmus",
                "max_model_len": model.max_model_len_tokens,
            }
            for model in self.hub.roster.models
        ]

    def model(self, name: str) -> dict[str, Any]:
        found = next((model for model in self.models() if model["id"] == name), None)
        if found is None:
            raise ModelNotFound(f"The model `{name[:128]}` does not exist", param="model")
        return found
