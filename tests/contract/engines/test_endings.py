"""However a sequence ends, everything it held is free, and nobody else notices."""

from __future__ import annotations

import asyncio

import pytest

from isthmus_shared.engines.kv_memory import MemoryKvSink, MemoryKvTransfer
from isthmus_shared.errors import Draining, PartyLost
from isthmus_shared.ids import RequestId
from isthmus_shared.messages.work import FinishReason
from isthmus_testing.engines import Harness, Make, ask, assert_same_output, hand_over, prompt_of

LOST = PartyLost("the peer's relay is gone").to_fault()


class SignallingSink(MemoryKvSink):
    """Says when the first bytes are filled: the prefill is under way."""

    def __init__(self, transfer: MemoryKvTransfer) -> None:
        super().__init__(transfer)
        self.began = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def filled(self, offset_bytes: int, size_bytes: int) -> None:
        super().filled(offset_bytes, size_bytes)
        self._loop.call_soon_threadsafe(self.began.set)


async def _abort(engine: Harness, name: str) -> None:
    engine.engine.abort(RequestId(name))
    assert (await engine.until(name)).finish is FinishReason.CANCELLED
    engine.assert_empty()


async def test_abort_while_waiting(make: Make, form: str) -> None:
    async with make(form, max_batch=1) as engine:
        engine.submit(ask("runs", prompt_of(20), max_tokens=400))
        engine.submit(ask("waits", prompt_of(20)))
        await engine.until("runs", tokens=1)
        engine.engine.abort(RequestId("waits"))
        assert (await engine.until("waits")).tokens == []
        await _abort(engine, "runs")


async def test_abort_while_prefilling_aborts_the_sink(make: Make, form: str) -> None:
    async with make(form, prefill_chunk_tokens=16) as engine:
        transfer = engine.transfer(2000)
        sink = transfer.sink = SignallingSink(transfer)
        engine.submit(ask("r", prompt_of(2000), save=transfer))
        await sink.began.wait()
        await _abort(engine, "r")
        assert transfer.fault is not None
        assert transfer.fault.code == "cancelled"
        assert not transfer.sealed
        assert engine.outcomes["r"].tokens == []


async def test_cancelled_prefills_cost_the_next_one_nothing(make: Make, form: str) -> None:
    """Ten long prompts are given up, one of them under way: the eleventh is next, after at most the step under way."""
    async with make(form, prefill_chunk_tokens=16, max_waiting=16) as engine:
        transfers = [engine.transfer(2000) for _ in range(10)]
        sink = transfers[0].sink = SignallingSink(transfers[0])
        for number, transfer in enumerate(transfers):
            engine.submit(ask(f"given up {number}", prompt_of(2000, seed=number), save=transfer))
        await sink.began.wait()
        for number in range(10):
            engine.engine.abort(RequestId(f"given up {number}"))
        await engine.until("given up 9")
        before = len(engine.reports)
        await engine.run(ask("next", prompt_of(40), max_tokens=1))
        prefilled = sum(report.prefill_tokens for report in engine.reports[before:])
        assert prefilled <= 40 + 16
        engine.assert_empty()


async def test_abort_while_decoding(make: Make, form: str) -> None:
    async with make(form) as engine:
        engine.submit(ask("r", prompt_of(20), max_tokens=400))
        await engine.until("r", tokens=3)
        await _abort(engine, "r")
        assert 3 <= len(engine.outcomes["r"].tokens) < 400


@pytest.mark.parametrize("state", ["nothing", "kv", "token"])
async def test_abort_while_loading_releases_the_source(make: Make, form: str, state: str) -> None:
    async with make(form) as a, make(form) as b:
        transfer = a.transfer(20)
        b.submit(ask("r", prompt_of(20), load=transfer))
        assert b.engine.load().loading == 1
        assert b.engine.load().kv_blocks_free == b.info.kv_blocks_total
        if state == "kv":
            await a.run(ask("r", prompt_of(20), save=transfer))
        if state == "token":
            b.engine.start_decode(RequestId("r"), 5)
        await _abort(b, "r")
        assert transfer.released


async def test_an_aborted_id_may_be_submitted_again_at_once(make: Make, form: str) -> None:
    async with make(form) as engine:
        wanted = await engine.run(ask("wanted", prompt_of(20)))
        transfer = engine.transfer(20)
        engine.submit(ask("r", prompt_of(20), load=transfer))
        engine.engine.abort(RequestId("r"))
        engine.submit(ask("r", prompt_of(20)))
        await engine.until("r")  # the first life's end
        del engine.outcomes["r"]
        assert_same_output(await engine.until("r"), wanted)
        engine.assert_empty()


async def test_a_failed_source_ends_its_own_sequence_only(make: Make, form: str) -> None:
    async with make(form) as engine:
        wanted = await engine.run(ask("wanted", prompt_of(30), max_tokens=60))
        transfer = engine.transfer(20)
        engine.submit(ask("other", prompt_of(30), max_tokens=60))
        engine.submit(ask("r", prompt_of(20), load=transfer))
        await engine.until("other", tokens=2)
        transfer.fail(LOST)
        failed = await engine.until("r")
        assert failed.finish is FinishReason.ERROR
        assert failed.fault == LOST
        assert transfer.released
        assert_same_output(await engine.until("other"), wanted)
        engine.assert_empty()


async def test_a_failed_sink_ends_its_own_sequence_only(make: Make, form: str) -> None:
    async with make(form) as engine:
        wanted = await engine.run(ask("wanted", prompt_of(300), max_tokens=20))
        transfer = engine.transfer(400)
        transfer.fail_sink_at(transfer.total_bytes // 2)
        engine.submit(ask("r", prompt_of(400), save=transfer))
        engine.submit(ask("other", prompt_of(300), max_tokens=20))
        failed = await engine.until("r")
        assert failed.finish is FinishReason.ERROR
        assert failed.fault is not None
        assert failed.fault.code == "transfer_failed"
        assert failed.tokens == []
        assert_same_output(await engine.until("other"), wanted)
        engine.assert_empty()


async def test_a_sink_that_fails_at_its_seal_gives_no_token(make: Make, form: str) -> None:
    async with make(form) as engine:
        transfer = engine.transfer(40)
        transfer.fail_sink_at(transfer.total_bytes)
        failed = await engine.run(ask("r", prompt_of(40), save=transfer))
        assert failed.finish is FinishReason.ERROR
        assert failed.tokens == []
        engine.assert_empty()


async def test_stop_cancels_everyone_and_frees_everything(make: Make, form: str) -> None:
    async with make(form, max_batch=1) as engine:
        loading, saving = engine.transfer(20), engine.transfer(20)
        engine.submit(ask("runs", prompt_of(20), max_tokens=400))
        engine.submit(ask("loads", prompt_of(20), load=loading))
        engine.submit(ask("waits", prompt_of(20), save=saving))
        await engine.until("runs", tokens=1)
        await engine.engine.stop()
        for name in ("runs", "loads", "waits"):
            assert (await engine.until(name)).finish is FinishReason.CANCELLED
        assert loading.released
        assert saving.fault is not None
        engine.assert_empty()
        with pytest.raises(Draining):
            engine.submit(ask("late", prompt_of(20)))


async def test_unknown_ids_are_ignored(make: Make, form: str) -> None:
    async with make(form) as engine:
        engine.engine.abort(RequestId("nobody"))
        engine.engine.start_decode(RequestId("nobody"), 1)
        assert (await engine.run(ask("r", prompt_of(5)))).finish is FinishReason.LENGTH


async def test_blocks_are_free_once_the_sink_is_sealed(make: Make, form: str) -> None:
    async with make(form) as a, make(form) as b:
        transfer = a.transfer(200)
        await a.run(ask("r", prompt_of(200), save=transfer))
        a.assert_empty()
        assert transfer.sealed
        assert not transfer.released
        b.submit(ask("r", prompt_of(200), load=transfer))
        b.engine.start_decode(RequestId("r"), a.outcomes["r"].tokens[0])
        assert (await b.until("r")).finish is FinishReason.LENGTH
        assert transfer.released


async def test_decode_goes_on_between_the_chunks_of_a_long_prefill(make: Make, form: str) -> None:
    async with make(form, prefill_chunk_tokens=32) as engine:
        engine.submit(ask("decodes", prompt_of(10), max_tokens=200))
        await engine.until("decodes", tokens=1)
        before = len(engine.outcomes["decodes"].tokens)
        await engine.run(ask("prefills", prompt_of(640), max_tokens=1))
        assert len(engine.outcomes["decodes"].tokens) - before >= 19
        await _abort(engine, "decodes")


async def test_a_sim_receiver_refuses_kv_of_another_prompt(make: Make, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("engines") != "own":
        pytest.skip("only the sim engine knows what a prompt's KV must be")
    async with make("sim") as a, make("sim") as b:
        right = await hand_over(a, b, "right", prompt_of(150))
        assert right.finish is FinishReason.LENGTH
        for place in (0, a.transfer(150).total_bytes - 1):
            transfer = a.transfer(150)
            first = await a.run(ask(f"r{place}", prompt_of(150), save=transfer))
            transfer.corrupt(place)
            b.submit(ask(f"r{place}", prompt_of(150), load=transfer))
            b.engine.start_decode(RequestId(f"r{place}"), first.tokens[0])
            refused = await b.until(f"r{place}")
            assert refused.fault is not None
            assert refused.fault.code == "transfer_failed"
        b.assert_empty()
