"""The two ways to answer: whole, or as a stream of chunks. The same for both front doors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from isthmus_ingress.choice import Burst, Choice, Piece, clip_offsets
from isthmus_ingress.exchange import Exchange, Finished
from isthmus_ingress.openai import render
from isthmus_ingress.text import Tokenizer
from isthmus_shared.messages.work import TokenLogprob


class Streamer:
    """Server-sent events of one exchange; one batch of bytes for whatever came at once."""

    def __init__(self, exchange: Exchange, identity: render.Identity, tokenizer: Tokenizer) -> None:
        self._exchange, self._prepared = exchange, exchange.prepared
        self._make = render.ChunkMaker(identity, usage_field=self._prepared.include_usage)
        self._tokenizer = tokenizer
        self._plain = self._prepared.plain

    async def batches(self) -> AsyncIterator[bytes]:
        """Ends after `[DONE]`. An error before the first batch is the answer's; a later one ends the stream."""
        exchange = self._exchange
        while not exchange.finished:
            parts: list[bytes] = []
            for choice, update in await exchange.updates():
                if not choice.began:
                    choice.began = True
                    self._begin(choice, parts)
                if type(update) is Burst:
                    if update.texts:
                        parts.append(self._make.burst(choice.index, update.texts))
                elif type(update) is Piece:
                    self._piece(choice, update, parts)
                elif type(update) is Finished:
                    parts.append(self._make.finish(choice.index, update.text, update.reason, usage=self._usage()))
            if exchange.finished:
                if self._prepared.include_usage:
                    parts.append(self._make.usage(exchange.usage))
                parts.append(render.DONE)
            if parts:
                yield b"".join(parts)

    def _begin(self, choice: Choice, parts: list[bytes]) -> None:
        prompt, told = self._prepared.prompts[choice.prompt], self._prepared.return_token_ids
        if self._prepared.chat:
            parts.append(self._make.role(choice.index, prompt.token_ids if told else None))
        elif prompt.text or told:
            extra = {"prompt_token_ids": prompt.token_ids, "token_ids": ()} if told else None
            parts.append(self._make.text(choice.index, prompt.text, extra=extra))

    def _piece(self, choice: Choice, piece: Piece, parts: list[bytes]) -> None:
        usage = self._usage()
        if piece.reasoning:
            parts.append(self._make.reasoning(choice.index, piece.reasoning))
        if self._plain:
            if piece.text:
                parts.append(self._make.text(choice.index, piece.text, usage=usage))
            return
        logprobs = None
        if piece.logprobs is not None:
            logprobs = _logprobs(self._exchange, piece.token_ids, piece.logprobs, piece.offsets, self._tokenizer)
        extra: dict[str, Any] | None = None
        if self._prepared.return_token_ids:
            extra = {"token_ids": piece.token_ids}
        parts.append(self._make.text(choice.index, piece.text, logprobs=logprobs, extra=extra, usage=usage))

    def _usage(self) -> render.Usage | None:
        return self._exchange.usage if self._prepared.continuous_usage else None


@dataclass(slots=True)
class _Whole:
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


async def whole_answer(exchange: Exchange, identity: render.Identity, tokenizer: Tokenizer) -> dict[str, Any]:
    """The answer's JSON object, when all choices have ended. Raises the first error of any."""
    prepared = exchange.prepared
    wholes = [_Whole() for _ in exchange.choices]
    while not exchange.finished:
        for choice, update in await exchange.updates():
            whole = wholes[choice.index]
            assert not isinstance(update, Burst), "only streams have bursts"
            whole.texts.append(update.text)
            if type(update) is Piece:
                whole.thoughts.append(update.reasoning)
                whole.token_ids.extend(update.token_ids)
                whole.logprobs.extend(update.logprobs or ())
                whole.offsets.extend(update.offsets)
    choices = [
        _choice(exchange, choice, whole, tokenizer) for choice, whole in zip(exchange.choices, wholes, strict=True)
    ]
    extra: dict[str, Any] = {}
    if prepared.return_token_ids and prepared.chat:
        extra["prompt_token_ids"] = list(prepared.prompts[0].token_ids)
    return render.answer(identity, choices, exchange.usage, extra)


def _choice(exchange: Exchange, choice: Choice, whole: _Whole, tokenizer: Tokenizer) -> dict[str, Any]:
    prepared = exchange.prepared
    text = "".join(whole.texts)
    logprobs = None
    if prepared.top_logprobs is not None:
        offsets = clip_offsets(whole.offsets, len(text))
        logprobs = _logprobs(exchange, whole.token_ids, whole.logprobs, offsets, tokenizer)
    extra: dict[str, Any] = {}
    prompt = prepared.prompts[choice.prompt]
    if prepared.return_token_ids:
        extra["token_ids"] = whole.token_ids
        if not prepared.chat:
            extra["prompt_token_ids"] = list(prompt.token_ids)
    assert choice.finish is not None
    if prepared.chat:
        reasoning = None if choice.channels is None else "".join(whole.thoughts)
        return render.chat_choice(choice.index, text, choice.finish, logprobs, extra, reasoning)
    return render.completion_choice(choice.index, prompt.text + text, choice.finish, logprobs, extra)


def _logprobs(
    exchange: Exchange,
    token_ids: list[int] | tuple[int, ...],
    logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...],
    offsets: list[int] | tuple[int, ...],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    if exchange.prepared.chat:
        return render.chat_logprobs(token_ids, logprobs, tokenizer.token_bytes)
    top = bool(exchange.prepared.top_logprobs)
    return render.completion_logprobs(token_ids, logprobs, offsets, tokenizer.token_bytes, top=top)
