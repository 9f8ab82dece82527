"""Answers and stream chunks in OpenAI's shapes.

What is the same in every chunk of a stream is made once (`ChunkMaker`); a token costs one JSON string and a join.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus_shared.messages.work import TokenLogprob

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0
"""Stands for −∞, which JSON can't say; the number is vLLM's."""

TokenBytes = Callable[[int], bytes]
_to_json_string = json.encoder.encode_basestring
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def to_json(value: Any) -> str:
    """Compact, as OpenAI's is."""
    return _ENCODER.encode(value)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Identity:
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str
    chat: bool

    def object_name(self, *, chunk: bool) -> str:
        if not self.chat:
            return "text_completion"
        return "chat.completion.chunk" if chunk else "chat.completion"

    def as_json(self, *, chunk: bool) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object_name(chunk=chunk),
            "created": self.created,
            "model": self.model,
        }


class ChunkMaker:
    """Bytes of the server-sent events of one answer."""

    def __init__(self, identity: Identity, *, usage_field: bool) -> None:
        head = to_json(identity.as_json(chunk=True))[:-1]
        self._open = f'data: {head},"choices":[{{"index":'
        self._chat = identity.chat
        self._tail = '}],"usage":null}\n\n' if usage_field else "}]}\n\n"
        self._head = head
        self._around: dict[int, tuple[bytes, bytes, bytes]] = {}
        """By choice: what comes before, after and between the texts of a burst."""

    def role(self, index: int, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """The first chunk of a chat choice; as vLLM's, it may tell the prompt's token ids beside `choices`."""
        delta = '{"role":"assistant","content":""}'
        tail = self._tail
        if prompt_token_ids is not None:
            tail = f'}}],"prompt_token_ids":{to_json(list(prompt_token_ids))}{tail[2:]}'
        return (f'{self._open}{index},"delta":{delta},"logprobs":null,"finish_reason":null{tail}').encode()

    def text(
        self,
        index: int,
        text: str,
        *,
        logprobs: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """One delta. `extra` holds fields of the choice beside OpenAI's (token ids)."""
        told = "null" if logprobs is None else to_json(logprobs)
        more = "" if extra is None else "," + to_json(extra)[1:-1]
        said = _to_json_string(text)
        body = f'"delta":{{"content":{said}}}' if self._chat else f'"text":{said}'
        tail = self._tail if usage is None else f'}}],"usage":{to_json(usage.as_json())}}}\n\n'
        return f'{self._open}{index},{body},"logprobs":{told},"finish_reason":null{more}{tail}'.encode()

    def burst(self, index: int, texts: Sequence[bytes]) -> bytes:
        """Deltas one after the other; each text is the inside of a JSON string."""
        around = self._around.get(index)
        if around is None:
            opening = '"delta":{"content":"' if self._chat else '"text":"'
            closing = '"}' if self._chat else '"'
            before = f"{self._open}{index},{opening}".encode()
            after = f'{closing},"logprobs":null,"finish_reason":null{self._tail}'.encode()
            around = self._around[index] = (before, after, after + before)
        before, after, between = around
        return before + between.join(texts) + after

    def reasoning(self, index: int, text: str) -> bytes:
        """A delta of what the model thinks aloud, in the field that DeepSeek's API gave it."""
        delta = f'{{"reasoning_content":{_to_json_string(text)}}}'
        return f'{self._open}{index},"delta":{delta},"logprobs":null,"finish_reason":null{self._tail}'.encode()

    def finish(self, index: int, text: str, reason: str, *, usage: Usage | None = None) -> bytes:
        """The last chunk of a choice, with text that was held back until the end was known."""
        said = _to_json_string(text)
        delta = "{}" if not text else f'{{"content":{said}}}'
        body = f'"delta":{delta}' if self._chat else f'"text":{said}'
        tail = self._tail if usage is None else f'}}],"usage":{to_json(usage.as_json())}}}\n\n'
        return f'{self._open}{index},{body},"logprobs":null,"finish_reason":"{reason}"{tail}'.encode()

    def usage(self, usage: Usage) -> bytes:
        """The chunk that `stream_options.include_usage` asks for."""
        return f'data: {self._head},"choices":[],"usage":{to_json(usage.as_json())}}}\n\n'.encode()


def chat_choice(
    index: int,
    text: str,
    finish: str,
    logprobs: dict[str, Any] | None,
    extra: dict[str, Any],
    reasoning: str | None = None,
) -> dict[str, Any]:
    """`reasoning`: of a model that answers on channels; None for others, whose messages have no such field."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish, **extra}


def completion_choice(
    index: int, text: str, finish: str, logprobs: dict[str, Any] | None, extra: dict[str, Any]
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, **extra}


def answer(
    identity: Identity, choices: Sequence[dict[str, Any]], usage: Usage, extra: dict[str, Any]
) -> dict[str, Any]:
    return {**identity.as_json(chunk=False), "choices": list(choices), "usage": usage.as_json(), **extra}


# Logprobs


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def _chat_token(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": data.decode("utf-8", errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], token_bytes: TokenBytes
) -> dict[str, Any]:
    content = []
    for token_id, told in zip(token_ids, logprobs, strict=True):
        top = [_chat_token(token_bytes(other), logprob) for other, logprob in told.top]
        content.append({**_chat_token(token_bytes(token_id), told.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_token(data: bytes) -> str:
    """A token's name in completions' logprobs: its text, or its bytes in OpenAI's notation when it isn't text."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    offsets: Sequence[int],
    token_bytes: TokenBytes,
    *,
    top: bool,
) -> dict[str, Any]:
    """`top_logprobs` always holds the chosen token, as OpenAI's does; it is null when none were asked for."""
    tops: list[dict[str, float]] = []
    names = [completion_token(token_bytes(token_id)) for token_id in token_ids]
    for name, told in zip(names, logprobs, strict=True):
        named = {completion_token(token_bytes(other)): _finite(logprob) for other, logprob in told.top}
        named.setdefault(name, _finite(told.logprob))
        tops.append(named)
    return {
        "tokens": names,
        "token_logprobs": [_finite(told.logprob) for told in logprobs],
        "top_logprobs": tops if top else None,
        "text_offset": list(offsets),
    }
