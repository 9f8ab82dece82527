"""What comes out: the same tokens whatever way a request takes."""

from __future__ import annotations

import asyncio

import pytest

from isthmus_shared.errors import ContextTooLong, InvalidRequest, ManifestMismatch, NoCapacity
from isthmus_shared.messages.work import FinishReason
from isthmus_testing.engines import Make, ask, assert_same_output, hand_over, prompt_of

PROMPTS = (1, 15, 16, 17, 63, 64, 65, 300, 1000)


async def test_a_handed_over_prompt_gives_the_aggregated_output(
    make: Make, producer: str, consumer: str, tolerance: float
) -> None:
    async with make(producer) as a, make(consumer) as b:
        for tokens in PROMPTS:
            prompt = prompt_of(tokens, seed=tokens)
            wanted = await a.run(ask(f"whole-{tokens}", prompt, salt="alone"))
            got = await hand_over(a, b, f"split-{tokens}", prompt)
            assert wanted.finish is FinishReason.LENGTH
            assert wanted.indexes == list(range(8))
            assert_same_output(got, wanted, tolerance=tolerance)
        a.assert_empty()
        b.assert_empty()


async def test_32_mixed_requests_at_once_give_what_each_gives_alone(
    make: Make, producer: str, consumer: str, tolerance: float
) -> None:
    lengths = [(1, 15, 16, 17, 63, 64, 65, 200)[i % 8] + i for i in range(32)]
    prompts = [prompt_of(length, seed=i) for i, length in enumerate(lengths)]
    async with make(producer) as a, make(consumer) as b:
        alone = [await b.run(ask(f"alone-{i}", prompt, salt="alone")) for i, prompt in enumerate(prompts)]
        runs = [
            b.run(ask(f"r-{i}", prompt)) if i % 3 == 0 else hand_over(a, b, f"r-{i}", prompt)
            for i, prompt in enumerate(prompts)
        ]
        together = await asyncio.gather(*runs)
        for got, wanted in zip(together, alone, strict=True):
            assert_same_output(got, wanted, tolerance=tolerance)
        a.assert_empty()
        b.assert_empty()


@pytest.mark.slow
async def test_long_and_short_prompts_at_once_give_what_each_gives_alone(
    make: Make, producer: str, consumer: str, tolerance: float
) -> None:
    lengths = [4000, 1, 2500, 1000, *(1 + (i * 37) % 130 for i in range(28))]
    prompts = [prompt_of(length, seed=i) for i, length in enumerate(lengths)]
    async with make(producer, prefill_chunk_tokens=200) as a, make(consumer) as b:
        runs = [hand_over(a, b, f"r-{i}", prompt) for i, prompt in enumerate(prompts)]
        together = await asyncio.gather(*runs)
        for i in range(len(prompts)):
            assert_same_output(
                together[i], await b.run(ask(f"alone-{i}", prompts[i], salt="alone")), tolerance=tolerance
            )
        a.assert_empty()
        b.assert_empty()


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.3, "seed": 7, "presence_penalty": 0.8}])
async def test_a_resumed_sequence_goes_on_with_the_same_tokens(
    make: Make, form: str, sampling: dict[str, float]
) -> None:
    prompt = prompt_of(40)
    async with make(form) as engine:
        whole = await engine.run(ask("whole", prompt, max_tokens=12, **sampling))
        for k in (1, 5, 11):
            sent = [*prompt, *whole.tokens[:k]]
            rest = await engine.run(ask(f"from-{k}", sent, output_offset=k, max_tokens=12, **sampling))
            assert rest.tokens == whole.tokens[k:]
            assert rest.indexes == list(range(k, 12))


async def test_a_resumed_sequence_is_handed_over_like_a_new_one(make: Make, form: str) -> None:
    prompt, sampling = prompt_of(40), {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.5, "max_tokens": 10}
    async with make(form) as a, make(form) as b:
        whole = await a.run(ask("whole", prompt, **sampling))
        rest = await hand_over(a, b, "rest", [*prompt, *whole.tokens[:4]], output_offset=4, **sampling)
        assert rest.tokens == whole.tokens[4:]
        assert rest.indexes == list(range(4, 10))


async def test_prefixes_are_shared_under_one_salt_only(make: Make, form: str, tolerance: float) -> None:
    prompt = prompt_of(200, seed=77)
    async with make(form) as engine:
        salts = ("a", "b", "", "a", "b", "")
        outcomes = [await engine.run(ask(f"r{i}", prompt, salt=salt)) for i, salt in enumerate(salts)]
        assert [outcome.cached for outcome in outcomes[:3]] == [0, 0, 0]
        assert all(outcome.cached >= 128 for outcome in outcomes[3:])
        for outcome in outcomes[1:]:
            assert_same_output(outcome, outcomes[0], tolerance=tolerance)


async def test_the_seed_decides_what_is_sampled(make: Make, form: str) -> None:
    async with make(form) as engine:
        one, again, other = [
            await engine.run(ask(name, prompt_of(20), temperature=1.5, seed=seed, max_tokens=20))
            for name, seed in (("one", 1), ("again", 1), ("other", 2))
        ]
        assert one.tokens == again.tokens != other.tokens


async def test_preempted_sequences_give_the_same_output(make: Make, form: str, tolerance: float) -> None:
    prompts = [prompt_of(50, seed=i) for i in range(4)]
    async with make(form) as roomy:
        wanted = [await roomy.run(ask(f"r-{i}", p, max_tokens=90)) for i, p in enumerate(prompts)]
    tokens_in_cache = 256  # four prompts fit, four outputs do not
    blocks = tokens_in_cache // roomy.info.kv_block_tokens
    async with make(form, kv_blocks=blocks) as tight:
        got = await asyncio.gather(*(tight.run(ask(f"r-{i}", p, max_tokens=90)) for i, p in enumerate(prompts)))
        assert tight.engine.preemptions > 0
        for one, other in zip(got, wanted, strict=True):
            assert_same_output(one, other, tolerance=tolerance)
        tight.assert_empty()


async def test_a_preempted_sequence_that_was_loaded_is_recomputed(make: Make, form: str, tolerance: float) -> None:
    prompts = [prompt_of(50, seed=i) for i in range(4)]
    async with make(form) as a:
        wanted = [await a.run(ask(f"r-{i}", p, max_tokens=90)) for i, p in enumerate(prompts)]
        async with make(form, kv_blocks=256 // a.info.kv_block_tokens) as tight:
            runs = [hand_over(a, tight, f"s-{i}", p, max_tokens=90) for i, p in enumerate(prompts)]
            got = await asyncio.gather(*runs)
            assert tight.engine.preemptions > 0
            for one, other in zip(got, wanted, strict=True):
                assert_same_output(one, other, tolerance=tolerance)
            tight.assert_empty()


async def test_a_preempted_prefill_fills_each_byte_of_its_sink_once(make: Make, form: str, tolerance: float) -> None:
    prompt = prompt_of(120, seed=3)
    async with make(form) as roomy:
        wanted = await roomy.run(ask("wanted", prompt))
        async with make(form, kv_blocks=256 // roomy.info.kv_block_tokens, prefill_chunk_tokens=4) as tight:
            tight.submit(ask("decodes", prompt_of(50), max_tokens=190))
            await tight.until("decodes", tokens=60)  # at 79 it needs the saver's blocks
            got = await hand_over(tight, roomy, "saves", prompt)
            assert tight.engine.preemptions == 1
            assert_same_output(got, wanted, tolerance=tolerance)


async def test_a_stop_token_ends_the_output_and_is_part_of_it(make: Make, form: str) -> None:
    async with make(form) as engine:
        whole = await engine.run(ask("whole", prompt_of(30), max_tokens=30))
        stop = whole.tokens[9]
        first_at = whole.tokens.index(stop)
        stopped = await engine.run(ask("stopped", prompt_of(30), max_tokens=30, stop_token_ids=(stop,)))
        assert stopped.finish is FinishReason.STOP
        assert stopped.tokens == whole.tokens[: first_at + 1]


async def test_max_tokens_one_ends_a_prefill_with_its_real_reason(make: Make, form: str) -> None:
    async with make(form) as engine:
        transfer = engine.transfer(30)
        only = await engine.run(ask("only", prompt_of(30), save=transfer, max_tokens=1))
        assert only.finish is FinishReason.LENGTH
        assert len(only.tokens) == 1
        assert transfer.sealed
        engine.assert_empty()


async def test_a_first_token_that_ends_the_output_ends_the_decode_side_too(make: Make, form: str) -> None:
    async with make(form) as a, make(form) as b:
        transfer = a.transfer(30)
        b.submit(ask("r", prompt_of(30), load=transfer, max_tokens=1))
        first = await a.run(ask("r", prompt_of(30), save=transfer, max_tokens=1))
        b.engine.start_decode(ask("r", (1,)).request_id, first.tokens[0])
        rest = await b.until("r")
        assert rest.finish is FinishReason.LENGTH
        assert rest.tokens == []
        assert transfer.released
        b.assert_empty()


async def test_logprobs_come_only_when_asked_for(make: Make, form: str) -> None:
    async with make(form) as engine:
        without = await engine.run(ask("without", prompt_of(9), logprobs=None))
        with_two = await engine.run(ask("with", prompt_of(9), logprobs=2))
        assert without.logprobs == []
        assert [len(entry.top) for entry in with_two.logprobs] == [2] * 8
        assert all(entry.logprob <= 0 for entry in with_two.logprobs)


async def test_what_can_never_run_is_refused_at_submit(make: Make, form: str) -> None:
    async with make(form, kv_blocks=4) as engine:
        limit = engine.info.max_model_len_tokens
        with pytest.raises(ContextTooLong):
            engine.submit(ask("long", prompt_of(limit + 1)))
        with pytest.raises(ContextTooLong):
            engine.submit(ask("much", prompt_of(limit - 8), max_tokens=9))
        with pytest.raises(InvalidRequest):
            engine.submit(ask("empty", ()))
        with pytest.raises(InvalidRequest):
            engine.submit(ask("alien", (1, 2**31)))
        with pytest.raises(ManifestMismatch):
            engine.submit(ask("size", prompt_of(9), load=engine.transfer(8)))
        fits = await engine.run(ask("fits", prompt_of(limit - 8), max_tokens=8))
        assert fits.finish is FinishReason.LENGTH
        engine.assert_empty()


async def test_a_full_queue_refuses_and_keeps_what_it_has(make: Make, form: str) -> None:
    async with make(form, max_batch=1, max_waiting=2) as engine:
        for name in ("a", "b"):
            engine.submit(ask(name, prompt_of(20)))
        with pytest.raises(NoCapacity) as refused:
            engine.submit(ask("c", prompt_of(20)))
        assert refused.value.retry_after_s is not None
        for name in ("a", "b"):
            assert (await engine.until(name)).finish is FinishReason.LENGTH
        assert (await engine.run(ask("c", prompt_of(20)))).finish is FinishReason.LENGTH
