"""Serves the page's three files and its state. The files say nothing; the state is for those with a key."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from importlib import resources

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from isthmus_ingress.openai.errors import Unauthorized
from isthmus_ingress.ui.state import UiState

FILES = {
    "page.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "picture.js": "text/javascript; charset=utf-8",
    "plots.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
}
POLICY = (
    "default-src 'self'",
    "img-src 'self' data:",
    "frame-ancestors 'none'",
    "base-uri 'none'",
    "form-action 'self'",
)
HEADERS = {
    "content-security-policy": "; ".join(POLICY),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class UiPages:
    """`admin_keys`: who may see the state. Without any, whoever reaches the page may, unless clients need keys."""

    def __init__(self, state: UiState, *, admin_keys: Sequence[str], clients_need_keys: bool) -> None:
        self._state = state
        self._keys = [key.encode() for key in admin_keys]
        self._closed = clients_need_keys and not admin_keys
        folder = resources.files(__package__)
        self._files = {name: (folder / name).read_bytes() for name in FILES}

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/ui", self._page),
            Route("/ui/state", self._snapshot),
            *(Route(f"/ui/{name}", self._file) for name in FILES if name != "page.html"),
        ]

    async def _page(self, _request: Request) -> Response:
        return Response(self._files["page.html"], media_type=None, headers=_headers("page.html"))

    async def _file(self, request: Request) -> Response:
        name = request.url.path.rsplit("/", 1)[-1]
        return Response(self._files[name], media_type=None, headers=_headers(name))

    async def _snapshot(self, request: Request) -> Response:
        """Raises `Unauthorized`."""
        self.check_admin(request)
        return JSONResponse(await self._state.snapshot(), headers={"cache-control": "no-store"})

    def check_admin(self, request: Request) -> None:
        """Raises `Unauthorized` for whoever may not see what all clients do."""
        if self._closed:
            raise Unauthorized(
                "the cluster's state is not shown to clients",
                why="this server has API keys and no admin key",
                todo="set ISTHMUS_INGRESS_ADMIN_KEYS and send one of them",
            )
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if self._keys and not (scheme.lower() == "bearer" and any(matches)):
            raise Unauthorized("the cluster's state needs an admin key", todo="send Authorization: Bearer with one")


def _headers(name: str) -> dict[str, str]:
    return {**HEADERS, "content-type": FILES[name]}
