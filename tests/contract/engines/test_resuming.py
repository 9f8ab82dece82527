"""Sequences that go on elsewhere: from their prompt's KV and the tokens so far, or from all their KV, given away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from isthmus_shared.engines.kv_memory import MemoryKvTransfer
from isthmus_shared.errors import ManifestMismatch, StaleParty, TransferFailed, Unavailable
from isthmus_shared.ids import RequestId
from isthmus_shared.kv.negotiate import require_exchangeable
from isthmus_shared.messages.work import FinishReason
from isthmus_testing.engines import Harness, Make, Outcome, ask, assert_same_output, prompt_of

PROMPTS = (1, 65, 200)
SENT = (1, 9)
OSL = 24
SAMPLED = {"temperature": 1.1, "seed": 5, "frequency_penalty": 0.4}


@pytest.fixture
def gives_away(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("engines") == "vllm":
        pytest.skip("vLLM gives no running sequence away (docs/adr/0009-recovery.md)")


async def staged(producer: Harness, name: str, prompt: Sequence[int], **sampling: object) -> MemoryKvTransfer:
    """The prompt's KV, as a prefill leaves it."""
    transfer = producer.transfer(len(prompt))
    first = await producer.run(ask(name, prompt, save=transfer, max_tokens=OSL, **sampling))
    assert first.finish is FinishReason.HANDOFF
    return transfer


async def resumed(
    consumer: Harness, name: str, tokens: Sequence[int], kv: MemoryKvTransfer, of: Harness, kv_tokens: int, **kw: object
) -> Outcome:
    manifest = of.engine.manifest(kv_tokens)
    require_exchangeable(consumer.engine.manifest(kv_tokens), manifest)
    return await consumer.run(ask(name, tokens, load=kv, manifest=manifest, **({"max_tokens": OSL} | kw)))


def prefilled(engine: Harness, name: str) -> int | None:
    """Tokens that were computed before its first output, where the engine tells."""
    outputs = [output for report in engine.reports for output in report.outputs if output.request_id == name]
    times = outputs[0].prefill
    return None if times is None else sum(tokens for tokens, _ in times.chunks)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_a_sequence_resumes_from_its_prompts_kv_and_the_tokens_so_far(
    make: Make, producer: str, consumer: str, tolerance: float, sampling: dict[str, float]
) -> None:
    async with make(producer) as a, make(consumer, prefill_chunk_tokens=8) as b:
        for length in PROMPTS:
            prompt = prompt_of(length, seed=length)
            whole = await a.run(ask(f"whole-{length}", prompt, max_tokens=12, **sampling))
            for k in SENT:
                kv = await staged(a, f"staged-{length}-{k}", prompt, **sampling)
                sent = [*prompt, *whole.tokens[:k]]
                rest = await resumed(
                    b, f"r-{length}-{k}", sent, kv, a, length, output_offset=k, max_tokens=12, **sampling
                )
                wanted = Outcome(whole.tokens[k:], whole.logprobs[k:], list(range(k, 12)), whole.finishes)
                assert_same_output(rest, wanted, tolerance=tolerance)
                assert prefilled(b, f"r-{length}-{k}") in (k, None), "only what was sent"
                assert kv.released
        a.assert_empty()
        b.assert_empty()


async def test_a_resumed_sequence_waits_for_its_kv_and_holds_nothing_meanwhile(make: Make, form: str) -> None:
    async with make(form) as engine:
        kv, manifest = engine.transfer(50), engine.engine.manifest(50)
        engine.submit(ask("r", prompt_of(60), load=kv, manifest=manifest, output_offset=10, max_tokens=20))
        other = await engine.run(ask("other", prompt_of(9)))
        assert other.finish is FinishReason.LENGTH
        assert engine.engine.load().loading == 1
        assert engine.engine.load().kv_blocks_free == engine.info.kv_blocks_total
        kv.fail(TransferFailed("lost").to_fault())
        failed = await engine.until("r")
        assert (failed.finish, failed.tokens) == (FinishReason.ERROR, [])
        assert failed.fault is not None
        assert failed.fault.code == "transfer_failed"
        engine.assert_empty()


async def test_kv_of_more_tokens_than_there_are_is_refused(make: Make, form: str) -> None:
    async with make(form) as engine:
        with pytest.raises(ManifestMismatch):
            engine.submit(ask("r", prompt_of(9), load=engine.transfer(10), manifest=engine.engine.manifest(10)))
        engine.assert_empty()


async def test_resumed_sequences_that_are_preempted_give_the_same_output(
    make: Make, form: str, tolerance: float
) -> None:
    prompts = [prompt_of(50, seed=i) for i in range(4)]
    async with make(form) as a:
        wanted = [await a.run(ask(f"w-{i}", p, max_tokens=90)) for i, p in enumerate(prompts)]
        async with make(form, kv_blocks=256 // a.info.kv_block_tokens) as tight:
            kvs = [await staged(a, f"s-{i}", p) for i, p in enumerate(prompts)]
            runs = []
            for i, (prompt, kv) in enumerate(zip(prompts, kvs, strict=True)):
                tokens, manifest = [*prompt, *wanted[i].tokens[:5]], a.engine.manifest(50)
                asked = ask(f"r-{i}", tokens, load=kv, manifest=manifest, output_offset=5, max_tokens=90)
                runs.append(tight.run(asked))
            got = await asyncio.gather(*runs)
            assert tight.engine.preemptions > 0
            for one, other in zip(got, wanted, strict=True):
                rest = Outcome(other.tokens[5:], other.logprobs[5:], other.indexes[5:], other.finishes)
                assert_same_output(one, rest, tolerance=tolerance)
            tight.assert_empty()


# -- given away


async def give_away(source: Harness, name: str) -> tuple[MemoryKvTransfer, int, Outcome]:
    """Its KV, how many tokens that is for, and what it had given."""
    tokens = await source.engine.pause(RequestId(name))
    transfer = source.transfer(tokens)
    source.engine.save(RequestId(name), transfer.sink)
    return transfer, tokens, await source.until(name)


@pytest.mark.usefixtures("gives_away")
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_a_running_sequence_that_is_given_away_goes_on_elsewhere(
    make: Make, producer: str, consumer: str, tolerance: float, sampling: dict[str, float]
) -> None:
    async with make(producer, prefill_chunk_tokens=32) as a, make(consumer) as b:
        for length in PROMPTS:
            prompt, name = prompt_of(length, seed=length), f"r-{length}"
            whole = await b.run(ask(f"whole-{length}", prompt, max_tokens=OSL, **sampling))
            a.submit(ask(name, prompt, max_tokens=OSL, **sampling))
            a.submit(ask(f"other-{length}", prompt_of(20, seed=7), max_tokens=OSL))  # goes on meanwhile
            await a.until(name, tokens=5)
            kv, tokens, given = await give_away(a, name)
            assert given.finish is FinishReason.HANDOFF
            assert kv.sealed
            k = len(given.tokens)
            assert 5 <= k < OSL
            assert tokens == length + k - 1, "all but the last token have KV"
            sent = [*prompt, *given.tokens]
            rest = await resumed(b, f"rest-{length}", sent, kv, a, tokens, output_offset=k, **sampling)
            got = Outcome(
                given.tokens + rest.tokens, given.logprobs + rest.logprobs, given.indexes + rest.indexes, rest.finishes
            )
            assert_same_output(got, whole, tolerance=tolerance)
            assert (await a.until(f"other-{length}")).finish is FinishReason.LENGTH
        a.assert_empty()
        b.assert_empty()


@pytest.mark.usefixtures("gives_away")
async def test_a_sequence_is_given_away_again_and_again(make: Make, producer: str, consumer: str) -> None:
    prompt = prompt_of(150, seed=3)
    async with make(producer) as a, make(consumer) as b:
        whole = await a.run(ask("whole", prompt, max_tokens=OSL))
        engines, tokens = [a, b], list[int]()
        a.submit(ask("r-0", prompt, max_tokens=OSL))
        for turn in range(4):
            here, there = engines[turn % 2], engines[(turn + 1) % 2]
            await here.until(f"r-{turn}", tokens=2)
            kv, of, given = await give_away(here, f"r-{turn}")
            tokens += given.tokens
            manifest, sent = here.engine.manifest(of), [*prompt, *tokens]
            offset = len(tokens)
            there.submit(ask(f"r-{turn + 1}", sent, load=kv, manifest=manifest, output_offset=offset, max_tokens=OSL))
        rest = await engines[0].until("r-4")
        assert tokens + rest.tokens == whole.tokens
        a.assert_empty()
        b.assert_empty()


@pytest.mark.usefixtures("gives_away")
async def test_a_paused_sequence_gives_nothing_until_it_is_resumed(make: Make, form: str) -> None:
    prompt, name = prompt_of(30), RequestId("r")
    async with make(form) as engine:
        whole = await engine.run(ask("whole", prompt, max_tokens=OSL))
        engine.submit(ask(name, prompt, max_tokens=OSL))
        await engine.until(name, tokens=3)
        await engine.engine.pause(name)
        await engine.run(ask("another", prompt_of(12)))
        had = list(engine.outcomes[name].tokens)
        await engine.run(ask("one more", prompt_of(12)))
        assert engine.outcomes[name].tokens == had
        assert engine.engine.load().running == 1
        engine.engine.check_invariants()
        engine.engine.resume(name)
        assert (await engine.until(name)).tokens == whole.tokens
        engine.assert_empty()


@pytest.mark.usefixtures("gives_away")
async def test_a_sequence_whose_kv_cannot_be_staged_goes_on_where_it_is(make: Make, form: str) -> None:
    prompt, name = prompt_of(200), RequestId("r")
    async with make(form, prefill_chunk_tokens=64) as engine:
        whole = await engine.run(ask("whole", prompt, max_tokens=OSL))
        engine.submit(ask(name, prompt, max_tokens=OSL))
        await engine.until(name, tokens=3)
        transfer = engine.transfer(await engine.engine.pause(name))
        transfer.fail_sink_at(transfer.total_bytes // 2)
        engine.engine.save(name, transfer.sink)
        got = await engine.until(name)
        assert (got.finish, got.tokens) == (FinishReason.LENGTH, whole.tokens)
        assert not transfer.sealed
        engine.assert_empty()


@pytest.mark.usefixtures("gives_away")
async def test_a_paused_sequence_may_be_aborted_before_and_during_its_save(make: Make, form: str) -> None:
    async with make(form) as engine:
        for name in (RequestId("idle"), RequestId("saving")):
            engine.submit(ask(name, prompt_of(30), max_tokens=OSL))
            await engine.until(name, tokens=2)
            transfer = engine.transfer(await engine.engine.pause(name))
            if name == "saving":
                engine.engine.save(name, transfer.sink)
            engine.engine.abort(name)
            assert (await engine.until(name)).finish is FinishReason.CANCELLED
            assert not transfer.sealed
        engine.assert_empty()


@pytest.mark.usefixtures("gives_away")
async def test_what_does_not_decode_cannot_be_given_away(make: Make, form: str) -> None:
    async with make(form) as engine:
        with pytest.raises(StaleParty):
            await engine.engine.pause(RequestId("nobody"))
        engine.submit(ask("loads", prompt_of(9), load=engine.transfer(9)))
        with pytest.raises(Unavailable):
            await engine.engine.pause(RequestId("loads"))
        engine.submit(ask("runs", prompt_of(9), max_tokens=OSL))
        await engine.until("runs", tokens=1)
        with pytest.raises(StaleParty):
            engine.engine.save(RequestId("runs"), engine.transfer(9).sink)
        tokens = await engine.engine.pause(RequestId("runs"))
        with pytest.raises(ManifestMismatch):
            engine.engine.save(RequestId("runs"), engine.transfer(tokens + 1).sink)
        engine.engine.resume(RequestId("runs"))
        assert (await engine.until("runs")).finish is FinishReason.LENGTH
        engine.engine.abort(RequestId("loads"))
        await engine.until("loads")
        engine.assert_empty()


@pytest.mark.usefixtures("gives_away")
async def test_an_engine_that_stops_leaves_no_pause_unanswered(make: Make, form: str) -> None:
    async with make(form) as engine:
        engine.submit(ask("r", prompt_of(9), max_tokens=OSL))
        await engine.until("r", tokens=1)
        await engine.engine.pause(RequestId("r"))
        await engine.engine.stop()
        assert (await engine.until("r")).finish is FinishReason.CANCELLED
        with pytest.raises(StaleParty):
            await engine.engine.pause(RequestId("r"))
