"""A worker gives a running sequence away, or keeps it if it can't."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from isthmus_decode.role import DecodeRole
from isthmus_shared.engines.kv_memory import MemoryKvSink
from isthmus_shared.errors import IsthmusError, ManifestMismatch, StaleParty, TransferFailed, Unavailable
from isthmus_shared.ids import Generation, Incarnation, RequestId, TransferId
from isthmus_shared.messages.work import (
    Cancel,
    FinishReason,
    KvTicket,
    Release,
    Released,
    SamplingParams,
    SaveSequence,
    SubmitDecode,
)
from isthmus_testing.worker_parts import RELAY, WORKER, Bench, manifest, worker_bench
from isthmus_worker.moving import save_sequence

ID, T, ENGINE_ID = RequestId("r"), TransferId("t"), RequestId("r#1")
DECODE = DecodeRole()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """One sequence decodes, aggregated; it has given tokens 0 and 1."""
    async with worker_bench() as bench:
        submit = SubmitDecode(
            request_id=ID,
            generation=Generation(1),
            incarnation=WORKER.incarnation,
            events_subject="events",
            token_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=40),
            transfer_deadline_s=30.0,
        )
        await DECODE.submit(bench.sessions, submit)
        await bench.report(ENGINE_ID, 0, 7, 8)
        yield bench


def save(**fields: Any) -> SaveSequence:
    given: dict[str, Any] = {
        "request_id": ID,
        "generation": 1,
        "incarnation": WORKER.incarnation,
        "transfer_id": T,
        "transfer_generation": 2,
        "deadline_s": 30.0,
        "retain_s": 60.0,
    }
    return SaveSequence(**(given | fields))


async def test_it_is_paused_then_staged_under_the_new_name_and_its_end_is_a_hand_over(bench: Bench) -> None:
    reply = await save_sequence(bench.sessions, save())
    assert reply.ticket == KvTicket(
        transfer_id=T, generation=Generation(2), source=RELAY, manifest=manifest(bench.engine.kv_tokens)
    )
    assert bench.engine.paused == [ENGINE_ID]
    assert bench.engine.saving == {ENGINE_ID: bench.link.transfers[T].sink}
    assert bench.link.retained_s == {T: 60.0}
    assert bench.engine.resumed == []
    await bench.report(ENGINE_ID, 2, finish=FinishReason.HANDOFF)
    _, event = bench.last()
    assert (event.output_index, event.token_ids, event.finish) == (2, (), FinishReason.HANDOFF)
    assert bench.sessions.idle.is_set(), "what is staged is the relay's"
    assert bench.link.aborted == []
    done = Release(incarnation=WORKER.incarnation, released=(Released(request_id=ID, generation=Generation(1)),))
    await bench.sessions.release(done)
    assert bench.link.aborted == [(T, 2, "cancelled")]


async def test_a_cancel_finds_what_was_given_away(bench: Bench) -> None:
    await save_sequence(bench.sessions, save())
    await bench.report(ENGINE_ID, 2, finish=FinishReason.HANDOFF)
    await bench.sessions.cancel(Cancel(request_id=ID, generation=Generation(1), incarnation=WORKER.incarnation))
    assert bench.link.aborted == [(T, 2, "cancelled")]
    assert len(bench.sessions.requests) == 0


@pytest.mark.parametrize("fields", [{"request_id": "other"}, {"generation": 2}, {"incarnation": Incarnation("x")}])
async def test_what_is_not_here_is_refused_and_nothing_is_touched(bench: Bench, fields: dict[str, Any]) -> None:
    with pytest.raises(StaleParty):
        await save_sequence(bench.sessions, save(**fields))
    assert (bench.engine.paused, bench.engine.resumed) == ([], [])


async def test_an_engine_that_cannot_pause_it_keeps_it(bench: Bench) -> None:
    bench.engine.refusal = Unavailable("not this engine")
    with pytest.raises(Unavailable):
        await save_sequence(bench.sessions, save())
    await bench.report(ENGINE_ID, 2, 9)
    assert bench.last()[1].token_ids == (9,), "it goes on"


@pytest.mark.parametrize("error", [StaleParty("ended"), ManifestMismatch("sizes differ")])
async def test_a_sink_that_the_engine_does_not_take_is_given_back(bench: Bench, error: IsthmusError) -> None:
    bench.engine.save_refusal = error
    with pytest.raises(type(error)):
        await save_sequence(bench.sessions, save())
    assert bench.engine.resumed == [ENGINE_ID]
    assert bench.link.transfers[T].fault is not None
    record = bench.sessions.requests.find(ID, Generation(1))
    assert record is not None
    assert record.sink is None


async def test_a_cancel_while_it_waits_for_staging_wins(bench: Bench) -> None:
    bench.link.room.clear()
    saving = asyncio.create_task(save_sequence(bench.sessions, save()))
    await bench.link.waiting.wait()
    await bench.sessions.cancel(Cancel(request_id=ID, generation=Generation(1), incarnation=WORKER.incarnation))
    bench.link.room.set()
    with pytest.raises(IsthmusError):
        await saving
    sink = bench.link.transfers[T].sink
    assert isinstance(sink, MemoryKvSink)
    assert bench.link.transfers[T].fault is not None, "the staging is free again"
    assert bench.engine.saving == {}


async def test_without_a_relay_it_goes_on(bench: Bench) -> None:
    bench.link.lost.set()
    with pytest.raises(TransferFailed):
        await save_sequence(bench.sessions, save())
    assert bench.engine.paused == [], "it was not even paused"
