"""A prompt whose beginning is in the cache gives the same output, costs less, and says so."""

from __future__ import annotations

import asyncio

import pytest

from isthmus_shared.ids import RequestId
from isthmus_shared.messages.work import FinishReason
from isthmus_shared.prefix import prefix_hashes
from isthmus_testing.engines import Harness, Make, ask, assert_same_output, hand_over, prompt_of


@pytest.fixture(autouse=True)
def own_engines(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("engines") != "own":
        pytest.skip("vLLM's own prefix cache is tested with its connector")


def whole_blocks(engine: Harness, tokens: int) -> int:
    """Of a prompt's tokens, those in whole blocks without its last token's."""
    return (tokens - 1) // engine.info.kv_block_tokens * engine.info.kv_block_tokens


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 200])
async def test_a_prompt_that_comes_again_is_computed_from_its_last_whole_block_on(
    make: Make, form: str, tokens: int
) -> None:
    prompt = prompt_of(tokens, seed=tokens)
    async with make(form, prefill_chunk_tokens=48) as engine:
        first = await engine.run(ask("first", prompt))
        again = await engine.run(ask("again", prompt))
        assert (first.cached, first.computed) == (0, tokens)
        assert again.cached == whole_blocks(engine, tokens)
        assert again.computed == tokens - again.cached
        assert_same_output(again, first)
        engine.assert_empty()


async def test_prompts_that_share_a_beginning_share_its_blocks_only(make: Make, form: str) -> None:
    shared = prompt_of(200)
    async with make(form) as engine:
        await engine.run(ask("first", [*shared, *prompt_of(50, seed=1)]))
        for end in (130, 200):
            prompt = [*shared[:end], *prompt_of(60, seed=end)]
            wanted = await engine.run(ask(f"alone-{end}", prompt, salt="alone"))
            got = await engine.run(ask(f"shared-{end}", prompt))
            assert got.cached == end // engine.info.kv_block_tokens * engine.info.kv_block_tokens
            assert_same_output(got, wanted)


@pytest.mark.parametrize("tokens", [65, 400])
async def test_a_cached_prefix_crosses_with_the_rest(make: Make, producer: str, consumer: str, tokens: int) -> None:
    prompt = prompt_of(tokens, seed=tokens)
    async with make(producer, prefill_chunk_tokens=48) as a, make(consumer) as b:
        wanted = await b.run(ask("wanted", prompt))
        once = await hand_over(a, b, "once", prompt)
        again = await hand_over(a, b, "again", prompt)
        assert (once.cached, again.cached) == (0, whole_blocks(a, tokens))
        assert_same_output(once, wanted)
        assert_same_output(again, wanted)
        a.assert_empty()
        b.assert_empty()


async def test_what_was_loaded_is_nobody_elses_prefix(make: Make, producer: str, consumer: str) -> None:
    prompt = prompt_of(400)  # longer than the windows: what they hide never crosses
    async with make(producer) as a, make(consumer) as b:
        handed = await hand_over(a, b, "handed", prompt, max_tokens=40)
        here = await b.run(ask("here", prompt, max_tokens=40))
        assert here.cached == 0
        assert_same_output(here, handed)


async def test_an_answer_is_the_prefix_of_the_next_turn(make: Make, form: str) -> None:
    prompt = prompt_of(100)
    async with make(form) as engine:
        answer = await engine.run(ask("answer", prompt, max_tokens=100))
        said = [*prompt, *answer.tokens, *prompt_of(30, seed=2)]
        wanted = await engine.run(ask("alone", said, salt="alone"))
        got = await engine.run(ask("next", said))
        assert got.cached == 199 // engine.info.kv_block_tokens * engine.info.kv_block_tokens
        assert_same_output(got, wanted)


async def test_another_salt_shares_nothing(make: Make, form: str) -> None:
    prompt = prompt_of(300)
    async with make(form) as engine:
        outcomes = [await engine.run(ask(f"{salt}-{i}", prompt, salt=salt)) for i in (0, 1) for salt in ("", "a", "b")]
        assert [outcome.cached for outcome in outcomes[:3]] == [0, 0, 0]
        assert [outcome.cached for outcome in outcomes[3:]] == [whole_blocks(engine, 300)] * 3
        assert all(outcome.computed == 300 - outcome.cached for outcome in outcomes)
        for outcome in outcomes[1:]:
            assert_same_output(outcome, outcomes[0])


async def test_off_means_off(make: Make, form: str) -> None:
    async with make(form, prefix_cache=False) as engine:
        assert engine.engine.prefixes is None
        for name in ("first", "again"):
            assert (await engine.run(ask(name, prompt_of(300)))).cached == 0


async def test_many_at_once_share_one_beginning(make: Make, form: str) -> None:
    shared = prompt_of(250)
    prompts = [[*shared, *prompt_of(10 + 7 * i, seed=i)] for i in range(6)]
    async with make(form, prefill_chunk_tokens=64) as engine:
        wanted = [await engine.run(ask(f"w-{i}", p, salt="alone", max_tokens=8)) for i, p in enumerate(prompts)]
        got = await asyncio.gather(*(engine.run(ask(f"r-{i}", p, max_tokens=8)) for i, p in enumerate(prompts)))
        for one, other in zip(got, wanted, strict=True):
            assert_same_output(one, other)
        again = await engine.run(ask("again", prompts[5]))
        assert again.cached == whole_blocks(engine, len(prompts[5]))
        engine.assert_empty()


async def test_one_that_is_aborted_leaves_the_others_their_blocks(make: Make, form: str) -> None:
    shared = prompt_of(192)
    async with make(form) as engine:
        wanted = await engine.run(ask("w", [*shared, 7], salt="alone", max_tokens=60))
        engine.submit(ask("gone", [*shared, 5], max_tokens=300))
        await engine.until("gone", tokens=2)
        engine.submit(ask("stays", [*shared, 7], max_tokens=60))
        await engine.until("stays", tokens=2)
        engine.engine.abort(RequestId("gone"))
        assert (await engine.until("gone")).finish is FinishReason.CANCELLED
        stays = await engine.until("stays")
        assert stays.cached == 192
        assert_same_output(stays, wanted)
        engine.assert_empty()


async def test_a_tight_cache_gives_its_kept_blocks_away_and_stays_right(make: Make, form: str) -> None:
    shared = prompt_of(64)
    prompts = [[*shared, *prompt_of(20 + i, seed=i)] for i in range(4)]
    async with make(form) as roomy:
        wanted = [await roomy.run(ask(f"w-{i}", p, max_tokens=50)) for i, p in enumerate(prompts)]
    async with make(form, kv_blocks=256 // roomy.info.kv_block_tokens) as tight:
        for attempt in range(2):
            runs = [tight.run(ask(f"r-{attempt}-{i}", p, max_tokens=50)) for i, p in enumerate(prompts)]
            for one, other in zip(await asyncio.gather(*runs), wanted, strict=True):
                assert_same_output(one, other)
            tight.assert_empty()
        assert tight.engine.preemptions > 0
        others = [await tight.run(ask(f"o-{i}", prompt_of(150, seed=50 + i))) for i in range(3)]
        assert all(outcome.finish is FinishReason.LENGTH for outcome in others)
        tight.assert_empty()
        for i, prompt in enumerate(prompts):
            assert_same_output(await tight.run(ask(f"last-{i}", prompt, max_tokens=50)), wanted[i])


async def test_what_is_cached_is_told_as_prefixes_of_64_tokens(make: Make, form: str) -> None:
    prompt = prompt_of(300)
    async with make(form, kv_blocks=512 // 64 * (64 // 16 if form != "reference-hnd-packed" else 1)) as engine:
        log = engine.engine.prefixes
        assert log is not None
        await engine.run(ask("r", prompt, salt="s", max_tokens=1))
        changes = log.take()
        assert changes.stored == log.snapshot(100) == prefix_hashes(prompt, "s")
        assert (len(changes.stored), changes.removed, changes.complete) == (4, (), True)
        for i in range(3):  # the cache holds 512 tokens
            await engine.run(ask(f"o-{i}", prompt_of(300, seed=9 + i), max_tokens=1))
        later = log.take()
        assert set(changes.stored) <= set(later.removed)
        assert set(later.stored).isdisjoint(later.removed)
        assert set(log.snapshot(100)) == set(later.stored)
