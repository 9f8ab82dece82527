"""What is asked, and when: pure, and the same for the same seed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

SYLLABLES = ("ka", "lo", "mi", "ter", "ron", "pa", "vel", "dis", "qu", "en", "sto", "ra", "ne", "ti", "ou", "ing")


@dataclass(frozen=True, slots=True)
class Shape:
    """One request's size."""

    words: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Asking:
    """How requests are written."""

    model: str | None
    chat: bool = True
    stream: bool = True
    temperature: float = 0.0
    ignore_eos: bool = True

    @property
    def path(self) -> str:
        return "/chat/completions" if self.chat else "/completions"

    def body(self, shape: Shape, random: Random) -> bytes:
        text = " ".join(random.choice(SYLLABLES) + random.choice(SYLLABLES) for _ in range(max(1, shape.words)))
        fields: dict[str, Any] = {} if self.model is None else {"model": self.model}
        fields |= {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        fields |= {"max_tokens": shape.output_tokens, "temperature": self.temperature}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(fields, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    """After the start."""
    shape: Shape


def poisson(rate: float, seconds: float, shape: Shape, random: Random) -> Iterator[Arrival]:
    at_s = random.expovariate(rate)
    while at_s < seconds:
        yield Arrival(at_s, shape)
        at_s += random.expovariate(rate)


def constant(rate: float, seconds: float, shape: Shape) -> Iterator[Arrival]:
    for number in range(int(rate * seconds)):
        yield Arrival(number / rate, shape)


def replayed(
    requests: Iterable[tuple[float, int, int]], *, speed: float, seconds: float, tokens_per_word: float
) -> Iterator[Arrival]:
    """Of a trace's (seconds, prompt tokens, output tokens), `speed` times as fast, up to `seconds`."""
    for at_s, prompt_tokens, output_tokens in requests:
        if at_s / speed >= seconds:
            return
        yield Arrival(at_s / speed, Shape(max(1, round(prompt_tokens / tokens_per_word)), output_tokens))
