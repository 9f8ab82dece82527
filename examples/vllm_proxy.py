"""The smallest proxy before two `vllm serve` with the Isthmus connector: prefill here, decode there (docs/vllm.md).

python examples/vllm_proxy.py --prefill http://a:8100 --decode http://b:8200 --port 8000

Every request goes to the prefill engine with one token of output; the `kv_transfer_params` of its answer go to the
decode engine with the request itself, whose answer is the client's. One engine each: to choose among many, or to carry
on when one dies, is what Isthmus' own ingress does.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MAX_WAIT_S = 600.0
"""For one answer to begin: the longest prefill and all that waits before it."""
PATHS = ("/v1/completions", "/v1/chat/completions")


class Proxy:
    def __init__(self, prefill: httpx.AsyncClient, decode: httpx.AsyncClient) -> None:
        self._prefill, self._decode = prefill, decode

    async def complete(self, request: Request) -> Response:
        try:
            body = await request.json()
        except ValueError as error:
            return _refusal(400, f"the body is not JSON: {error}")
        if not isinstance(body, dict):
            return _refusal(400, "the body is not a JSON object")
        first = await self._prefill.post(request.url.path, json=_first_token_only(body))
        if first.status_code != 200:
            return Response(first.content, first.status_code, media_type="application/json")
        params = first.json().get("kv_transfer_params")
        asked = {**body, "kv_transfer_params": params} if params else body
        answer = await self._decode.send(self._decode.build_request("POST", request.url.path, json=asked), stream=True)
        return StreamingResponse(_relayed(answer), answer.status_code, media_type=answer.headers.get("content-type"))

    async def models(self, request: Request) -> Response:
        answer = await self._decode.get("/v1/models")
        return Response(answer.content, answer.status_code, media_type="application/json")


def _first_token_only(body: dict[str, Any]) -> dict[str, Any]:
    one = {key: value for key, value in body.items() if key not in ("stream_options", "max_completion_tokens")}
    return {**one, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}


async def _relayed(answer: httpx.Response) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(answer):
        async for piece in answer.aiter_bytes():
            yield piece


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)


async def _unreachable(request: Request, error: Exception) -> Response:
    return _refusal(502, f"an engine did not answer: {type(error).__name__}: {error}")


def application(prefill_url: str, decode_url: str) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with (
            httpx.AsyncClient(base_url=prefill_url, timeout=MAX_WAIT_S) as prefill,
            httpx.AsyncClient(base_url=decode_url, timeout=MAX_WAIT_S) as decode,
        ):
            app.state.proxy = Proxy(prefill, decode)
            yield

    async def complete(request: Request) -> Response:
        proxy: Proxy = request.app.state.proxy
        return await proxy.complete(request)

    async def models(request: Request) -> Response:
        proxy: Proxy = request.app.state.proxy
        return await proxy.models(request)

    routes = [Route(path, complete, methods=["POST"]) for path in PATHS] + [Route("/v1/models", models)]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={httpx.TransportError: _unreachable})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, help="the prefill engine's URL")
    parser.add_argument("--decode", required=True, help="the decode engine's URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(application(arguments.prefill, arguments.decode), host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
