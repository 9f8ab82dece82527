"""The openai SDK, unmodified, against the real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from isthmus_ingress.service import Ingress
from isthmus_testing.fake_cluster import FakeCluster
from isthmus_testing.ingress import ingress_stack
from isthmus_testing.waiting import eventually


@asynccontextmanager
async def sdk(
    folder: Path, script: str, **options: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, FakeCluster, Ingress]]:
    async with ingress_stack(folder, script, **options) as (ingress, cluster, _):
        url = f"http://{ingress.address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client, cluster, ingress


HI: Any = [{"role": "user", "content": "hi"}]


async def test_chat_gives_the_text_the_reason_and_the_usage(folder: Path) -> None:
    async with sdk(folder, "hello wörld", cached_tokens=3) as (client, cluster, _):
        answer = await client.chat.completions.create(model="tiny", messages=HI)
        assert answer.choices[0].message.content == "hello wörld"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        prompt = "<|bos|><|user|>hi<|end|><|assistant|>"
        sent = cluster.workers["p1"].submits[0].token_ids
        assert sent == (256, 260, *b"hi", 263, 261), prompt
        assert answer.usage.prompt_tokens == len(sent)
        assert answer.usage.completion_tokens == len("hello wörld".encode()) + 1
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_a_streamed_chat_is_role_then_deltas_then_reason_then_usage(folder: Path) -> None:
    async with sdk(folder, "hé!") as (client, _, _ingress):
        stream = await client.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hé!"
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 5
        assert len({chunk.id for chunk in chunks}) == 1
        assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


async def test_completions_take_texts_and_token_ids(folder: Path) -> None:
    async with sdk(folder, "xyz") as (client, cluster, _):
        answer = await client.completions.create(model="tiny", prompt=["ab", "c"], n=2, max_tokens=2)
        assert [choice.text for choice in answer.choices] == ["xy"] * 4
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.finish_reason for choice in answer.choices] == ["length"] * 4
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
        seeds = [work.sampling.seed for work in cluster.workers["p1"].submits]
        assert len(set(seeds)) == 2, "each of the n has its own seed, and each prompt the same ones"
        await client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=1)
        assert cluster.workers["p1"].submits[-1].token_ids == (1, 2, 3)


async def test_one_token_needs_no_decode_worker(folder: Path) -> None:
    async with sdk(folder, "xyz") as (client, cluster, _):
        answer = await client.completions.create(model="tiny", prompt="a", max_tokens=1)
        assert answer.choices[0].text == "x"
        assert cluster.workers["d1"].submits == []
        assert cluster.workers["d1"].cancels == cluster.workers["p1"].cancels == []


async def test_echo_puts_the_prompt_before_the_answer(folder: Path) -> None:
    async with sdk(folder, "xyz") as (client, _, _ingress):
        answer = await client.completions.create(model="tiny", prompt="ab", echo=True, max_tokens=2)
        assert answer.choices[0].text == "abxy"
        stream = await client.completions.create(model="tiny", prompt="ab", echo=True, max_tokens=2, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "abxy"


async def test_chat_logprobs_have_tokens_bytes_and_alternatives(folder: Path) -> None:
    async with sdk(folder, "é") as (client, _, _ingress):
        answer = await client.chat.completions.create(
            model="tiny", messages=HI, logprobs=True, top_logprobs=3, max_completion_tokens=2
        )
        told = answer.choices[0].logprobs
        assert told is not None
        assert told.content is not None
        assert [entry.bytes for entry in told.content] == [[0xC3], [0xA9]]
        assert [entry.logprob for entry in told.content] == [-0.5, -0.5]
        assert [top.logprob for top in told.content[0].top_logprobs] == [-0.5, -1.5, -9999.0]
        stream = await client.chat.completions.create(
            model="tiny", messages=HI, logprobs=True, max_completion_tokens=2, stream=True
        )
        chunks = [chunk async for chunk in stream]
        entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
        assert [entry.bytes for entry in entries] == [[0xC3], [0xA9]]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "é"


async def test_completion_logprobs_have_offsets_and_the_chosen_token(folder: Path) -> None:
    async with sdk(folder, "aéb") as (client, _, _ingress):
        answer = await client.completions.create(model="tiny", prompt="p", logprobs=1, max_tokens=4)
        told = answer.choices[0].logprobs
        assert told is not None
        assert told.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
        assert told.text_offset == [0, 1, 1, 2]
        assert told.top_logprobs is not None
        assert told.top_logprobs[0] == {"a": -0.5}
        assert answer.choices[0].text == "aéb"


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_a_stop_string_is_shown_and_all_is_cancelled(folder: Path, stream: bool) -> None:
    async with sdk(folder, "one two END three") as (client, cluster, _):
        if stream:
            chunks = await client.chat.completions.create(model="tiny", messages=HI, stop=[" END", "zz"], stream=True)
            got = [chunk.choices[0] async for chunk in chunks]
            text, reason = "".join(choice.delta.content or "" for choice in got), got[-1].finish_reason
        else:
            answer = await client.chat.completions.create(model="tiny", messages=HI, stop=[" END", "zz"])
            text, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
        assert (text, reason) == ("one two", "stop")
        await eventually(lambda: not cluster.held)
        assert [cancel.reason for cancel in cluster.workers["d1"].cancels] == ["finished"]


async def test_text_held_back_for_a_stop_comes_when_there_is_none(folder: Path) -> None:
    async with sdk(folder, "so EN") as (client, _, _ingress):
        answer = await client.chat.completions.create(model="tiny", messages=HI, stop=" END")
        assert answer.choices[0].message.content == "so EN"


async def test_a_stop_token_ends_the_answer_and_is_no_text(folder: Path) -> None:
    async with sdk(folder, "abcd") as (client, _, _ingress):
        answer = await client.completions.create(
            model="tiny", prompt="p", extra_body={"stop_token_ids": [ord("c")], "return_token_ids": True}
        )
        assert answer.choices[0].text == "ab"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].token_ids == list(b"abc")  # type: ignore[attr-defined]
        assert answer.choices[0].prompt_token_ids == list(b"p")  # type: ignore[attr-defined]


async def test_a_streams_first_chunk_tells_the_prompts_tokens_if_asked(folder: Path) -> None:
    ask: Any = {"model": "tiny", "stream": True, "extra_body": {"return_token_ids": True}}
    async with sdk(folder, "ab") as (client, cluster, _):
        stream = await client.chat.completions.create(messages=HI, stream_options={"include_usage": True}, **ask)
        first, *others = [chunk async for chunk in stream]
        assert first.prompt_token_ids == list(cluster.workers["p1"].submits[0].token_ids)
        assert first.usage is None
        assert not any(hasattr(chunk, "prompt_token_ids") for chunk in others)
        for echo in (False, True):
            texts = await client.completions.create(prompt=["xy", "z"], echo=echo, max_tokens=2, **ask)
            chunks = [chunk.choices[0] async for chunk in texts]
            for index, prompt in enumerate(("xy", "z")):
                mine = [choice for choice in chunks if choice.index == index]
                assert mine[0].prompt_token_ids == list(prompt.encode())
                assert not any(hasattr(choice, "prompt_token_ids") for choice in mine[1:])
                assert [token for choice in mine for token in getattr(choice, "token_ids", [])] == list(b"ab")
                assert "".join(choice.text for choice in mine) == (prompt if echo else "") + "ab"


@pytest.mark.parametrize("chat", [True, False])
async def test_several_choices_are_streamed_side_by_side_and_each_ones_gaps_are_measured(
    folder: Path, chat: bool
) -> None:
    async with sdk(folder, "abc", step_s=0.01) as (client, _, ingress):
        texts, reasons = ["", "", ""], ["", "", ""]
        usage = None
        options: Any = {"model": "tiny", "n": 3, "stream": True, "stream_options": {"include_usage": True}}
        create: Any = client.chat.completions.create if chat else client.completions.create
        async for chunk in await create(**options, **({"messages": HI} if chat else {"prompt": "p"})):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                assert reasons[choice.index] == "", "nothing comes after a choice's end"
                texts[choice.index] += (choice.delta.content if chat else choice.text) or ""
                reasons[choice.index] = choice.finish_reason or ""
        assert (texts, reasons) == (["abc"] * 3, ["stop"] * 3)
        assert usage.completion_tokens == 3 * 4
        await eventually(lambda: not ingress.runtime.metrics.requests_in_flight._value.get())
        page = ingress.runtime.metrics.exposition().decode()
        assert "isthmus_inter_token_latency_seconds_count 9.0" in page, "three gaps in each of the three"
        assert "isthmus_time_to_first_token_seconds_count 1.0" in page
        assert 'isthmus_request_success_total{finished_reason="stop"} 3.0' in page
        assert "isthmus_request_generation_tokens_sum 12.0" in page
        assert "isthmus_request_time_per_output_token_seconds_count 3.0" in page


async def test_several_choices_of_a_chat_are_one_answer(folder: Path) -> None:
    async with sdk(folder, "abc") as (client, _, _ingress):
        answer = await client.chat.completions.create(model="tiny", messages=HI, n=3)
        assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
            (index, "abc", "stop") for index in range(3)
        ]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3 * 4


async def test_models_are_what_the_workers_serve(folder: Path) -> None:
    async with sdk(folder, "x") as (client, _, _ingress):
        models = (await client.models.list()).data
        assert [model.id for model in models] == ["tiny"]
        assert (await client.models.retrieve("tiny")).model_extra == {"max_model_len": 4096}
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("other")
        assert caught.value.code == "model_not_found"


async def test_errors_are_the_sdks_own_types(folder: Path) -> None:
    async with sdk(folder, "x", max_model_len_tokens=32) as (client, cluster, _):
        create = client.chat.completions.create
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="gpt-4", messages=HI)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as negative:
            await create(model="tiny", messages=HI, max_tokens=-1)
        assert negative.value.param == "max_tokens"
        with pytest.raises(openai.BadRequestError) as long:
            await create(model="tiny", messages=[{"role": "user", "content": "x" * 64}])
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
        assert "32" in str(long.value)
        assert "68" in str(long.value)
        with pytest.raises(openai.BadRequestError) as much:
            await create(model="tiny", messages=HI, max_completion_tokens=30)
        assert (much.value.code, much.value.param) == ("context_length_exceeded", "max_completion_tokens")
        with pytest.raises(openai.BadRequestError) as tools:
            await create(model="tiny", messages=HI, tools=[{"type": "function", "function": {"name": "f"}}])
        assert tools.value.param == "tools"
        assert cluster.routes == [], "nothing of this is the planner's business"


async def test_a_request_that_fails_after_tokens_is_an_error_event(folder: Path) -> None:
    async with sdk(folder, "abcdef", settings={"attempts": 1}) as (client, cluster, _):
        cluster.workers["d1"].faults.fail_after = 2
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        told: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                told.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError) as caught:
            await read()
        assert "".join(told) == "abc"
        assert caught.value.code == "engine_failed"


async def test_a_request_that_fails_before_tokens_is_a_status(folder: Path) -> None:
    async with sdk(folder, "abcdef", names=("p1",)) as (client, _, _ingress):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        assert caught.value.response.headers["retry-after"] == "2"
        assert caught.value.response.headers["x-request-id"]
