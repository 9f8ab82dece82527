"""A bug of the ingress costs the one request that met it a typed 500, and nobody else anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from isthmus_ingress.detokenize import Detokenizer, JsonTexts
from isthmus_ingress.text import ModelText, Tokenizer, load_model_text
from isthmus_shared.messages import subjects
from isthmus_testing.ingress import ingress_stack

HI: Any = [{"role": "user", "content": "hi"}]
FATAL_PROMPT = "fatal"


class BuggyTokenizer:
    """Fails on one prompt, and on every `!` of an answer."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        assert FATAL_PROMPT not in text
        return self._inner.encode(text, special=special)

    def _shown(self, token_id: int) -> bytes:
        assert token_id != ord("!")
        return self._inner.shown_bytes(token_id)

    def detokenizer(self, *, special: bool = False) -> Detokenizer:
        return Detokenizer(self._shown)

    @property
    def json_texts(self) -> JsonTexts:
        return JsonTexts(self._shown)


def load_buggy(folder: Path) -> ModelText:
    text = load_model_text(folder)
    return replace(text, tokenizer=BuggyTokenizer(text.tokenizer))  # type: ignore[arg-type]


SETTINGS = {"load_text": load_buggy}


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_bug_before_the_answer_is_a_json_500(folder: Path, path: str) -> None:
    async with ingress_stack(folder, "ok", settings=SETTINGS) as (ingress, _, _broker), httpx.AsyncClient() as http:
        url = f"http://{ingress.address}{path}"
        response = await http.post(url, json={"prompt": FATAL_PROMPT}, headers={"x-request-id": "mine-1"})
        assert (response.status_code, response.headers["x-request-id"]) == (500, "mine-1")
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "mine-1" in error["message"]
        assert (await http.post(url, json={"prompt": "fine"})).status_code == 200


async def test_a_bug_in_the_middle_is_an_error_event_or_a_500_and_nobody_is_left(folder: Path) -> None:
    async with ingress_stack(folder, "ab!c", settings=SETTINGS, step_s=0.02) as (ingress, cluster, _):
        url = f"http://{ingress.address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="tiny", messages=HI)
            told: list[str] = []

            async def read() -> None:
                stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
                async for chunk in stream:
                    told.append(chunk.choices[0].delta.content or "")

            with pytest.raises(openai.APIError) as caught:
                await read()
            assert caught.value.code == "internal_error"
            assert "".join(told) == "ab"
        page = ingress.runtime.metrics.exposition().decode()
        assert 'isthmus_requests_total{endpoint="chat",outcome="internal_error"} 2.0' in page
        assert cluster.routes, "it had begun"


async def test_a_bug_in_a_request_over_nats_is_its_last_message(folder: Path) -> None:
    settings = {**SETTINGS, "serve_http": False}
    async with ingress_stack(folder, "ab!c", settings=settings) as (_, _cluster, broker):
        bus = broker.client()
        for body in ({"prompt": FATAL_PROMPT}, {"prompt": "x"}):
            answer = await bus.request(subjects.API_COMPLETIONS, json.dumps(body).encode(), timeout_s=5)
            assert json.loads(answer.data)["error"]["code"] == "internal_error"
            assert answer.headers["isthmus-status"] == "500"
        answer = await bus.request(subjects.API_MODELS, b"", timeout_s=5)
        assert json.loads(answer.data)["data"]


async def test_a_cancel_subject_that_is_none_is_refused(folder: Path) -> None:
    async with ingress_stack(folder, "ok", serve_http=False) as (_, _cluster, broker):
        bus = broker.client()
        for subject in ("a b", "*", "", subjects.ROUTE, subjects.API_CANCEL, f"{subjects.ROOT}.api.cancel.acme"):
            body = json.dumps({"prompt": "x"}).encode()
            headers = {"isthmus-cancel": subject}
            answer = await bus.request(subjects.API_COMPLETIONS, body, timeout_s=5, headers=headers)
            assert json.loads(answer.data)["error"]["param"] == "isthmus-cancel"
        assert json.loads((await bus.request(subjects.API_COMPLETIONS, body, timeout_s=5)).data)["choices"]
