"""`isthmus chat`: a conversation with the cluster through its own OpenAI endpoint."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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


@dataclass(slots=True)
class Answer:
    """What one turn gave; `isthmus chat --json` prints it."""

    model: str
    content: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class Chat:
    def __init__(self, base_url: str, model: str, *, max_tokens: int | None, system: str | None) -> None:
        self._url, self.model, self._max_tokens = f"{base_url}/v1/chat/completions", model, max_tokens
        self._history = [] if system is None else [Message("system", system)]
        self._client = httpx.Client(timeout=httpx.Timeout(READ_S, connect=CONNECT_S), trust_env=False)

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, prompt: str, show: Callable[[str], None]) -> Answer:
        """One turn: each piece of the answer goes to `show` as it comes. The turn is kept only if it succeeds.

        Raises the typed error that the server sent, or `Unavailable` when it cannot be reached.
        """
        messages = [*self._history, Message("user", prompt)]
        body = {
            "model": self.model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._max_tokens is not None:
            body["max_completion_tokens"] = self._max_tokens
        answer = Answer(self.model)
        try:
            with self._client.stream("POST", self._url, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise _error(response.status_code, response.text)
                for piece in _pieces(response.iter_lines(), answer):
                    show(piece)
        except httpx.HTTPError as error:
            raise Unavailable(f"{self._url} cannot be reached", why=str(error) or type(error).__name__) from error
        self._history = [*messages, Message("assistant", answer.content)][-MAX_TURNS:]
        return answer


def _pieces(lines: Iterator[str], answer: Answer) -> Iterator[str]:
    """The text in a stream of server-sent events, which `answer` takes up; raises on an `error` event or an end
    without ``[DONE]``."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        fields = json.loads(data)
        if "error" in fields:
            raise _error(500, data)
        answer.usage = fields.get("usage") or answer.usage
        for choice in fields.get("choices", ()):
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            piece = choice.get("delta", {}).get("content") or ""
            answer.content += piece
            yield piece
    raise Unavailable("the answer broke off", why="the connection closed before its end", todo="ask again")


def _error(status: int, text: str) -> IsthmusError:
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = text.strip()[:500] or f"HTTP status {status}"
    if status in (429, 503):
        return Unavailable(message)
    return InvalidRequest(message) if status < 500 else EngineFailed(message)


def say(talk: Chat, prompt: str, *, as_json: bool) -> None:
    """One turn on stdout: as it streams, or as one line of JSON."""
    if as_json:
        print(json.dumps(dataclasses.asdict(talk.ask(prompt, lambda piece: None)), ensure_ascii=False), flush=True)
    else:
        talk.ask(prompt, lambda piece: print(piece, end="", flush=True))
        print()


def converse(talk: Chat, *, as_json: bool) -> None:
    """Until Ctrl-D or Ctrl-C; one failed turn does not end it."""
    while True:
        try:
            prompt = input("" if as_json else "> ").strip()
            if prompt:
                say(talk, prompt, as_json=as_json)
        except (EOFError, KeyboardInterrupt):
            print(end="" if as_json else "\n")
            return
        except IsthmusError as error:
            print(f"\nisthmus: {error.text}", file=sys.stderr)
