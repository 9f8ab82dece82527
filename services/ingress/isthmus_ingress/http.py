"""The HTTP front door: OpenAI's paths, vLLM's small extras, and the pages that operators ask for."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import isthmus_shared
from isthmus_ingress.frontend import Frontend
from isthmus_ingress.generate import GenerateEndpoint, HttpLimits
from isthmus_ingress.http_exchange import WIRE, Message, Receive, Scope, Send
from isthmus_ingress.http_wire import check_json, header, read_body, send_error
from isthmus_ingress.openai.body import parse_object
from isthmus_ingress.openai.errors import (
    MethodNotAllowed,
    NoSuchPath,
    Unauthorized,
    error_body,
    error_headers,
    internal_error,
)
from isthmus_ingress.openai.openapi import MAX_TOKENIZE, document
from isthmus_ingress.tenants import ANYONE
from isthmus_ingress.ui.pages import UiPages
from isthmus_shared.errors import Cancelled, InvalidRequest, IsthmusError
from isthmus_shared.ids import new_id
from isthmus_shared.metrics import CONTENT_TYPE
from isthmus_shared.service import ServiceRuntime

CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""An `x-request-id` that a client may choose; it goes into logs and headers."""


class ApiApp:
    """Gives every request an id, checks its key, and takes the two generating paths past the framework."""

    def __init__(
        self,
        runtime: ServiceRuntime[Any],
        frontend: Frontend,
        limits: HttpLimits,
        *,
        ui: UiPages,
    ) -> None:
        self._frontend = frontend
        self._keyring = frontend.keyring
        self._generate = {
            "/v1/chat/completions": GenerateEndpoint(frontend, limits, chat=True),
            "/v1/completions": GenerateEndpoint(frontend, limits, chat=False),
        }
        self._pages = _pages(_Pages(runtime, frontend, limits, ui), ui, sorted(self._generate))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        given = header(scope, b"x-request-id") or ""
        request_id = given if CLIENT_REQUEST_ID.fullmatch(given) else new_id("req")
        path = scope["path"]
        tenant = ANYONE
        if path.startswith(("/v1/", "/tokenize", "/detokenize")):
            try:
                tenant = self._keyring.tenant_of(header(scope, b"authorization"))
            except Unauthorized as error:
                self._frontend.refused(error)
                await send_error(send, error, {"x-request-id": request_id, "connection": "close"})
                return
        generate = self._generate.get(path)
        if generate is not None and scope["method"] == "POST":
            await generate(scope[WIRE], request_id, tenant)
            return

        scope["isthmus.request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            with self._frontend.guarded(request_id):
                await self._pages(scope, receive, send_with_id)
        except IsthmusError:
            pass  # `_bug` has answered; the framework raises the bug again, so that it can be logged


def _pages(pages: _Pages, ui: UiPages, posted: Sequence[str]) -> Starlette:
    routes = [
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/health", pages.health),
        Route("/ping", pages.health, methods=["GET", "POST"]),
        Route("/live", pages.live),
        Route("/ready", pages.ready),
        Route("/metrics", pages.metrics),
        Route("/version", pages.version),
        Route("/openapi.json", pages.openapi),
        Route("/tokenize", pages.tokenize, methods=["POST"]),
        Route("/detokenize", pages.detokenize, methods=["POST"]),
        *ui.routes,
        *(Route(path, pages.never, methods=["POST"]) for path in posted),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_error, IsthmusError: _isthmus_error, Exception: _bug}
    return Starlette(routes=routes, exception_handlers=handlers)


def _error_response(error: IsthmusError, headers: dict[str, str]) -> JSONResponse:
    return JSONResponse(error_body(error), error.http_status, {**headers, **error_headers(error)})


async def _isthmus_error(_request: Request, error: IsthmusError) -> Response:
    return _error_response(error, {})


async def _bug(request: Request, _error: Exception) -> Response:
    return _error_response(internal_error(request.scope["isthmus.request_id"]), {})


async def _http_error(request: Request, error: HTTPException) -> Response:
    """What the router refuses: a path or a method."""
    path = request.url.path[:256]
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 405:
        allowed = headers.get("allow", "another method")
        return _error_response(
            MethodNotAllowed(f"{request.method} is not allowed on {path}", todo=f"use {allowed}"), headers
        )
    return _error_response(NoSuchPath(f"Invalid URL ({request.method} {path})"), headers)


class _Pages:
    def __init__(self, runtime: ServiceRuntime[Any], frontend: Frontend, limits: HttpLimits, ui: UiPages) -> None:
        self._runtime, self._frontend, self._limits, self._ui = runtime, frontend, limits, ui

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._frontend.models()})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._frontend.model(request.path_params["name"]))

    async def health(self, _request: Request) -> Response:
        fields = {
            "service": self._runtime.name,
            "instance": self._runtime.instance,
            "incarnation": self._runtime.incarnation,
            "version": isthmus_shared.__version__,
            "state": self._runtime.state.value,
            "bus_connected": self._runtime.bus.connected,
            "problems": self._runtime.problems(),
        }
        return JSONResponse(fields)

    async def live(self, _request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, _request: Request) -> Response:
        problems = self._runtime.problems()
        return JSONResponse({"ready": not problems, "problems": problems}, 503 if problems else 200)

    async def metrics(self, request: Request) -> Response:
        """Names every tenant and what it uses: as the state, no page for clients. The health port has it, too."""
        self._ui.check_admin(request)
        self._runtime.metrics.bus_connected.set(self._runtime.bus.connected)
        return Response(self._runtime.metrics.exposition(), media_type=None, headers={"content-type": CONTENT_TYPE})

    async def version(self, _request: Request) -> Response:
        return JSONResponse({"version": isthmus_shared.__version__})

    async def openapi(self, _request: Request) -> Response:
        return JSONResponse(document())

    async def never(self, _request: Request) -> Response:
        raise AssertionError("the generating paths are taken before the router")

    async def tokenize(self, request: Request) -> Response:
        """vLLM's: {"prompt": text} or {"messages": [...]} → {"tokens", "count", "max_model_len"}."""
        async with self._body(request) as body:
            model = self._frontend.hub.roster.model(body.get("model") if isinstance(body.get("model"), str) else None)
            ours = ("prompt", "messages", "model", "add_generation_prompt")
            known = {name: value for name, value in body.items() if name in ours}
            token_ids = await self._frontend.preparer.tokenize(known, model)
        fields = {"count": len(token_ids), "max_model_len": model.max_model_len_tokens, "tokens": token_ids}
        return JSONResponse(fields)

    async def detokenize(self, request: Request) -> Response:
        """vLLM's: {"tokens": [...]} → {"prompt": text}."""
        async with self._body(request) as body:
            return JSONResponse({"prompt": self._detokenized(body)})

    def _detokenized(self, body: dict[str, Any]) -> str:
        token_ids = body.get("tokens")
        if (
            not isinstance(token_ids, list)
            or len(token_ids) > MAX_TOKENIZE
            or any(type(token_id) is not int or token_id < 0 for token_id in token_ids)
        ):
            raise InvalidRequest("tokens is invalid", why="it must be a list of token ids", param="tokens")
        text = self._frontend.preparer.text(str(body.get("model")))
        return text.tokenizer.decode(token_ids, special=True)

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        check_json(request.scope)
        scope, receive, limits = request.scope, request.receive, self._limits
        with self._frontend.bodies.share() as take:
            try:
                data = await read_body(
                    scope, receive, take, limit_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s
                )
            except Cancelled as error:
                raise HTTPException(499) from error
            yield parse_object(data)
