"""A gpt-oss model through the real ingress: reasoning apart from content, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from isthmus_shared.engines.reference.checkpoint import EOS_TOKEN_ID, byte_tokenizer
from isthmus_testing.ingress import ingress_stack

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>")
HI: Any = [{"role": "user", "content": "hi"}]
SAID = "<|channel|>analysis<|message|>Thé user<|end|><|start|>assistant<|channel|>final<|message|>Hällo"


@pytest.fixture
def harmony_folder(folder: Path) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    return folder


def script(_prompt: tuple[int, ...], index: int) -> int:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(MARKERS))
    ids = tokenizer.encode(SAID).ids
    return ids[index] if index < len(ids) else EOS_TOKEN_ID


async def test_what_the_model_thinks_is_not_what_it_says(harmony_folder: Path) -> None:
    async with ingress_stack(harmony_folder, "", tokens=script) as (ingress, _, _):
        url = f"http://{ingress.address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(model="tiny", messages=HI)
            message: Any = whole.choices[0].message
            assert (message.content, message.reasoning_content) == ("Hällo", "Thé user")

            stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
            deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream]
            assert "".join(delta.content or "" for delta in deltas) == "Hällo"
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Thé user"

            stopped = await client.chat.completions.create(model="tiny", messages=HI, stop=["er", "ll"])
            message = stopped.choices[0].message
            assert (message.content, message.reasoning_content) == ("Hä", "Thé user")

            raw = await client.completions.create(model="tiny", prompt="hi", max_tokens=99)
            assert raw.choices[0].text == "analysisThé userassistantfinalHällo"
