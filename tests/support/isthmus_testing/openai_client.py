"""Completions over HTTP with token ids in and out, and the aggregated engine's answers to compare them with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from isthmus_shared.engines.config import EngineConfig, EngineKind
from isthmus_shared.engines.factory import create_engine
from isthmus_testing.engines import Outcome, ask, running

MODEL = "isthmus-demo"
REQUEST_S = 90.0
"""Longest that a test waits for one answer."""


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    max_tokens: int = 24
    temperature: float = 0.0
    seed: int = 0

    def body(self, **more: Any) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "logprobs": 3,
            "return_token_ids": True,
            **more,
        }


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    error: dict[str, Any] | None = None
    """The OpenAI-shaped error, when that is how it ended."""


def client(base_url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=128)
    return httpx.AsyncClient(base_url=base_url, timeout=REQUEST_S, trust_env=False, limits=limits)


async def complete(http: httpx.AsyncClient, case: Case) -> Answer:
    response = await http.post("/v1/completions", json=case.body())
    fields = response.json()
    if response.status_code != httpx.codes.OK:
        return Answer(error=fields["error"])
    (choice,) = fields["choices"]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])


async def stream(http: httpx.AsyncClient, case: Case, on_tokens: Callable[[], Awaitable[None]]) -> Answer:
    """`on_tokens` is called after each chunk with tokens in it."""
    answer = Answer()
    async with (
        asyncio.timeout(REQUEST_S),
        http.stream("POST", "/v1/completions", json=case.body(stream=True)) as response,
    ):
        if response.status_code != httpx.codes.OK:
            answer.error = json.loads(await response.aread())["error"]
            return answer
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if not data or data == "[DONE]":
                continue
            fields = json.loads(data)
            if "error" in fields:
                answer.error = fields["error"]
                continue
            for choice in fields["choices"]:
                answer.token_ids += choice.get("token_ids", ())
                answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())
                answer.finish = choice["finish_reason"] or answer.finish
            await on_tokens()
    return answer


async def aggregated(model: Path, cases: Sequence[Case], *, kv_layout: str = "nhd:16:fp32") -> list[Outcome]:
    """What one engine that does everything itself answers to each case."""
    config = EngineConfig(kind=EngineKind.REFERENCE, model_path=model, model_name=MODEL, kv_layout=kv_layout)
    async with running(create_engine(config)) as harness:
        return await asyncio.gather(
            *(
                harness.run(
                    ask(
                        f"case-{number}",
                        case.prompt,
                        max_tokens=case.max_tokens,
                        temperature=case.temperature,
                        seed=case.seed,
                    )
                )
                for number, case in enumerate(cases)
            )
        )


def assert_same(answer: Answer, expected: Outcome, *, tolerance: float = 1e-5) -> None:
    assert answer.error is None, answer.error
    assert answer.token_ids == expected.tokens
    assert answer.finish == expected.finish.value
    assert len(answer.logprobs) == len(expected.logprobs)
    worst = max(abs(ours - theirs.logprob) for ours, theirs in zip(answer.logprobs, expected.logprobs, strict=True))
    assert worst <= tolerance, f"logprobs differ by {worst}"
