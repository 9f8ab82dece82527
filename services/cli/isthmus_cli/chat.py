"""`isthmus chat`: a conversation with the cluster through its own OpenAI endpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx

from isthmus_shared.errors import EngineFailed, InvalidRequest, IsthmusError, Unavailable

CONNECT_S = 5.0
READ_S = 120.0
"""Longest silence within a stream; the server's own deadlines are shorter."""
MAX_TURNS = 200
"""Messages kept; the model's context is full long before."""


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


class Chat:
    def __init__(self, base_url: str, model: str, *, max_tokens: int | None, system: str | None) -> None:
        self._url, self._model, self._max_tokens = f"{base_url}/v1/chat/completions", model, max_tokens
        self._history = [] if system is None else [Message("system", system)]
        self._client = httpx.Client(timeout=httpx.Timeout(READ_S, connect=CONNECT_S), trust_env=False)

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, prompt: str, show: Callable[[str], None]) -> None:
        """One turn: each piece of the answer goes to `show` as it comes. The turn is kept only if it succeeds.

        Raises the typed error that the server sent, or `Unavailable` when it cannot be reached.
        """
        messages = [*self._history, Message("user", prompt)]
        body = {
            "model": self._model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "stream": True,
        }
        if self._max_tokens is not None:
            body["max_completion_tokens"] = self._max_tokens
        pieces: list[str] = []
        try:
            with self._client.stream("POST", self._url, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise _error(response.status_code, response.text)
                for piece in _pieces(response.iter_lines()):
                    pieces.append(piece)
                    show(piece)
        except httpx.HTTPError as error:
            raise Unavailable(f"{self._url} cannot be reached", why=str(error) or type(error).__name__) from error
        self._history = [*messages, Message("assistant", "".join(pieces))][-MAX_TURNS:]


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """The text in a stream of server-sent events; raises on an `error` event or an end without ``[DONE]``."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        fields = json.loads(data)
        if "error" in fields:
            raise _error(500, data)
        for choice in fields.get("choices", ()):
            yield choice.get("delta", {}).get("content") or ""
    raise Unavailable("the answer broke off", why="the connection closed before its end", todo="ask again")


def _error(status: int, text: str) -> IsthmusError:
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = text.strip()[:500] or f"HTTP status {status}"
    if status in (429, 503):
        return Unavailable(message)
    return InvalidRequest(message) if status < 500 else EngineFailed(message)
