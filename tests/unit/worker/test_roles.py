"""Both roles and the sessions under them, over an engine and a relay link that the test leads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from isthmus_decode.role import DecodeRole
from isthmus_prefill.role import PrefillRole
from isthmus_shared.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    IsthmusError,
    ManifestMismatch,
    NoCapacity,
    StaleParty,
    TransferFailed,
)
from isthmus_shared.ids import Generation, Incarnation, RequestId, TransferId
from isthmus_shared.kv.manifest import KvDtype
from isthmus_shared.messages.work import (
    Cancel,
    FinishReason,
    KvTicket,
    Release,
    Released,
    SamplingParams,
    StartDecode,
    SubmitDecode,
    SubmitPrefill,
)
from isthmus_testing import eventually
from isthmus_testing.worker_parts import RELAY, WORKER, Bench, manifest, worker_bench
from isthmus_worker.watch import enforce_deadlines

PREFILL, DECODE = PrefillRole(staging_wait_s=1.0), DecodeRole()
ID, T = RequestId("r"), TransferId("t")
SAMPLING = SamplingParams(max_tokens=4)


def prefill(generation: int = 1, **fields: Any) -> SubmitPrefill:
    given: dict[str, Any] = {
        "request_id": ID,
        "generation": generation,
        "incarnation": WORKER.incarnation,
        "transfer_id": T,
        "events_subject": "events",
        "token_ids": (1, 2, 3),
        "sampling": SAMPLING,
        "deadline_s": 30.0,
    }
    return SubmitPrefill(**(given | fields))


def decode(generation: int = 1, *, ticket: bool = True, **fields: Any) -> SubmitDecode:
    given: dict[str, Any] = {
        "request_id": ID,
        "generation": generation,
        "incarnation": WORKER.incarnation,
        "events_subject": "events",
        "token_ids": (1, 2, 3),
        "sampling": SAMPLING,
        "transfer_deadline_s": 30.0,
        "ticket": KvTicket(transfer_id=T, generation=Generation(generation), source=RELAY, manifest=manifest(3))
        if ticket
        else None,
    }
    return SubmitDecode(**(given | fields))


def cancel(generation: int = 1) -> Cancel:
    return Cancel(request_id=ID, generation=Generation(generation), incarnation=WORKER.incarnation)


def engine_id(generation: int = 1) -> RequestId:
    return RequestId(f"r#{generation}")


async def refusal_of(submit: Awaitable[object]) -> IsthmusError | None:
    try:
        await submit
    except IsthmusError as error:
        return error
    return None


def nothing_held(bench: Bench) -> bool:
    bench.sessions.requests.check_invariants()
    return len(bench.sessions.requests) == 0 and bench.sessions.idle.is_set()


async def test_a_prefill_gets_its_sink_first_and_answers_with_the_ticket() -> None:
    async with worker_bench() as bench:
        reply = await PREFILL.submit(bench.sessions, prefill())
        assert reply.ticket == KvTicket(
            transfer_id=T, generation=Generation(1), source=RELAY, manifest=bench.engine.manifest(3)
        )
        assert bench.engine.held[engine_id()].kv_save is bench.link.transfers[T].sink


async def test_a_release_frees_what_is_retained_and_nothing_that_runs() -> None:
    async with worker_bench() as bench:
        await PREFILL.submit(bench.sessions, prefill(retain_s=90.0))
        assert bench.link.retained_s == {T: 90.0}
        released = Release(
            incarnation=WORKER.incarnation, released=(Released(request_id=ID, generation=Generation(1)),)
        )
        await bench.sessions.release(released)
        assert bench.link.aborted == [], "it is being computed"
        await bench.report(engine_id(), 0, 7, finish=FinishReason.HANDOFF)
        now_s = asyncio.get_running_loop().time()
        assert bench.sessions.requests.due(now_s + 31) == [], "its deadline is that of the retained KV now"
        await bench.sessions.release(released.model_copy(update={"incarnation": Incarnation("another life")}))
        assert bench.link.aborted == []
        await bench.sessions.release(released)
        assert bench.link.aborted == [(T, 1, "cancelled")]
        assert nothing_held(bench)


async def test_a_handed_over_prefill_stays_until_its_cancel_finds_the_staged_kv() -> None:
    async with worker_bench() as bench:
        await PREFILL.submit(bench.sessions, prefill())
        await bench.report(engine_id(), 0, 7, finish=FinishReason.HANDOFF)
        subject, event = bench.last()
        assert (subject, event.request_id, event.token_ids, event.finish) == ("events", ID, (7,), FinishReason.HANDOFF)
        assert bench.link.aborted == [], "staged KV waits to be fetched"
        assert bench.sessions.idle.is_set()
        await bench.sessions.cancel(cancel())
        assert bench.link.aborted == [(T, 1, "cancelled")]
        assert bench.engine.aborted == []
        assert nothing_held(bench)


async def test_a_prefill_that_its_first_token_ends_leaves_nothing_staged() -> None:
    async with worker_bench() as bench:
        await PREFILL.submit(bench.sessions, prefill())
        await bench.report(engine_id(), 0, 7, finish=FinishReason.STOP)
        assert bench.last()[1].finish is FinishReason.STOP
        assert bench.link.aborted == [(T, 1, "cancelled")]
        assert nothing_held(bench)


async def test_a_cancelled_prefill_is_aborted_at_the_relay_only_after_the_engine_let_go() -> None:
    async with worker_bench() as bench:
        await PREFILL.submit(bench.sessions, prefill())
        await bench.sessions.cancel(cancel())
        assert bench.engine.aborted == [engine_id()]
        assert bench.link.aborted == [], "the engine may still write into the staging slots"
        assert not bench.sessions.idle.is_set()
        await bench.report(engine_id(), 0, 7, finish=FinishReason.HANDOFF)  # it was faster than the abort
        assert bench.link.aborted == [(T, 1, "cancelled")]
        assert bench.sent == [], "nobody wants to hear of it"
        assert nothing_held(bench)


async def test_a_cancel_before_its_submit_wins_and_opens_nothing() -> None:
    async with worker_bench() as bench:
        await bench.sessions.cancel(cancel())
        for submit in (PREFILL.submit(bench.sessions, prefill()), DECODE.submit(bench.sessions, decode())):
            with pytest.raises(Cancelled):
                await submit
        assert not bench.link.waiting.is_set()
        assert nothing_held(bench)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_cancel_while_its_submit_waits_for_the_relay_wins(side: str) -> None:
    async with worker_bench() as bench, asyncio.TaskGroup() as group:
        bench.link.room.clear()
        submit = PREFILL.submit(bench.sessions, prefill()) if side == "prefill" else None
        work = group.create_task(refusal_of(submit or DECODE.submit(bench.sessions, decode())))
        await bench.link.waiting.wait()
        await bench.sessions.cancel(cancel())
        assert bench.link.aborted == [(T, 1, "cancelled")]
        bench.link.room.set()
        assert isinstance(await work, Cancelled)
        transfer = bench.link.transfers[T]
        assert transfer.fault is not None if side == "prefill" else transfer.released
        assert bench.engine.held == {}
        assert nothing_held(bench)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_what_the_engine_refuses_is_given_back(side: str) -> None:
    async with worker_bench() as bench:
        bench.engine.refusal = NoCapacity("full")
        submit = PREFILL.submit(bench.sessions, prefill()) if side == "prefill" else None
        with pytest.raises(NoCapacity):
            await (submit or DECODE.submit(bench.sessions, decode()))
        transfer = bench.link.transfers[T]
        assert transfer.fault is not None if side == "prefill" else transfer.released
        assert nothing_held(bench)


async def test_a_newer_generation_ends_the_older_and_an_older_one_is_refused() -> None:
    async with worker_bench() as bench:
        await DECODE.submit(bench.sessions, decode(2))
        with pytest.raises(StaleParty):
            await DECODE.submit(bench.sessions, decode(1))
        assert bench.engine.aborted == []
        await DECODE.submit(bench.sessions, decode(3, ticket=False))
        assert bench.engine.aborted == [engine_id(2)]
        await bench.report(engine_id(2), 1, 9)
        assert bench.sent == [], "the old attempt is not heard any more"
        await bench.report(engine_id(3), 0, 9)
        assert bench.last()[1].generation == 3


async def test_another_life_of_the_worker_is_refused_by_name() -> None:
    other = Incarnation("another")
    async with worker_bench() as bench:
        held = bench.sessions
        await PREFILL.submit(held, prefill())
        with pytest.raises(StaleParty):
            await PREFILL.submit(held, prefill(2, incarnation=other))
        with pytest.raises(StaleParty):
            await DECODE.submit(held, decode(2, incarnation=other))
        with pytest.raises(StaleParty):
            await held.cancel(cancel(2).model_copy(update={"incarnation": other}))
        start = StartDecode(request_id=ID, generation=Generation(1), incarnation=other, first_token_id=1)
        with pytest.raises(StaleParty):
            await held.start_decode(start)
        assert held.requests.find(ID, Generation(1)) is not None


async def test_a_first_token_that_overtakes_its_submit_is_kept_for_it() -> None:
    start = StartDecode(request_id=ID, generation=Generation(1), incarnation=WORKER.incarnation, first_token_id=7)
    async with worker_bench() as bench, asyncio.TaskGroup() as group:
        with pytest.raises(StaleParty):
            await bench.sessions.start_decode(start)
        bench.link.room.clear()
        submit = group.create_task(DECODE.submit(bench.sessions, decode()))
        await bench.link.waiting.wait()
        await bench.sessions.start_decode(start)
        assert bench.engine.started == []
        bench.link.room.set()
        await submit
        assert bench.engine.started == [(engine_id(), 7)]
        await bench.sessions.start_decode(start)
        assert bench.engine.started == [(engine_id(), 7)], "a repeated start is taken once"


async def test_kv_of_another_form_is_refused_with_the_field_named() -> None:
    ticket = KvTicket(transfer_id=T, generation=Generation(1), source=RELAY, manifest=manifest(3, KvDtype.BF16))
    async with worker_bench() as bench:
        with pytest.raises(ManifestMismatch, match="dtype"):
            await DECODE.submit(bench.sessions, decode().model_copy(update={"ticket": ticket}))
        assert bench.link.transfers == {}
        assert nothing_held(bench)


async def test_a_ticket_of_a_later_generation_is_refused_and_an_earlier_ones_is_taken() -> None:
    async with worker_bench() as bench:
        with pytest.raises(StaleParty):
            await DECODE.submit(bench.sessions, decode(2).model_copy(update={"generation": Generation(1)}))
        assert nothing_held(bench)
        await DECODE.submit(bench.sessions, decode(1).model_copy(update={"generation": Generation(2)}))
        assert bench.engine.held[engine_id(2)].kv_load is bench.link.transfers[T].source
        await bench.sessions.cancel(cancel(2))
        await bench.report(engine_id(2), 1, finish=FinishReason.CANCELLED)
        assert bench.link.aborted == [(T, 1, "cancelled")], "the flow has the name that it was staged under"
        assert nothing_held(bench)


async def test_a_resumed_sequence_waits_for_no_first_token() -> None:
    async with worker_bench() as bench:
        ticket = KvTicket(transfer_id=T, generation=Generation(1), source=RELAY, manifest=manifest(2), pull=2)
        await DECODE.submit(bench.sessions, decode(3, output_offset=1).model_copy(update={"ticket": ticket}))
        held = bench.engine.held[engine_id(3)]
        assert (held.resumes, held.loaded_tokens, held.output_offset) == (True, 2, 1)
        await bench.sessions.fail(bench.sessions.requests.everything(), TransferFailed("x").to_fault())
        assert bench.last()[1].output_index == 1, "the token that the ingress waits for"


async def test_a_ticket_for_more_tokens_than_were_sent_is_refused() -> None:
    ticket = KvTicket(transfer_id=T, generation=Generation(1), source=RELAY, manifest=manifest(4))
    async with worker_bench() as bench:
        with pytest.raises(ManifestMismatch):
            await DECODE.submit(bench.sessions, decode().model_copy(update={"ticket": ticket}))
        assert nothing_held(bench)


async def test_without_a_relay_only_aggregated_work_is_taken() -> None:
    async with worker_bench(relay=False) as bench:
        with pytest.raises(TransferFailed):
            await PREFILL.submit(bench.sessions, prefill())
        with pytest.raises(TransferFailed):
            await DECODE.submit(bench.sessions, decode())
        assert nothing_held(bench)
        await DECODE.submit(bench.sessions, decode(ticket=False))
        assert bench.engine.held[engine_id()].kv_load is None


async def test_losing_the_relay_fails_what_is_crossing_and_spares_what_streams() -> None:
    async with worker_bench() as bench:
        await DECODE.submit(bench.sessions, decode())
        await bench.report(engine_id(), 1, 9)
        crossing = decode(request_id=RequestId("q"), output_offset=5)
        await DECODE.submit(bench.sessions, crossing)
        bench.link.lost.set()
        await eventually(lambda: bench.link.closed)
        (_, event) = bench.last()
        assert event.fault is not None
        assert (event.request_id, event.finish, event.fault.code) == ("q", FinishReason.ERROR, "transfer_failed")
        assert event.output_index == 6, "the index that its ingress waits for, or the fault would count as a duplicate"
        assert bench.engine.aborted == ["q#1"]
        await bench.report(engine_id(), 2, 9)
        assert bench.last()[1].output_index == 2


async def test_a_transfer_that_misses_its_deadline_fails_by_that_name_and_is_freed() -> None:
    async with worker_bench() as bench, asyncio.TaskGroup() as group:
        watch = group.create_task(enforce_deadlines(bench.sessions))
        await DECODE.submit(bench.sessions, decode(transfer_deadline_s=0.02))
        await DECODE.submit(bench.sessions, decode(request_id=RequestId("alone"), ticket=False))
        await eventually(lambda: bool(bench.sent))
        (_, event) = bench.last()
        assert event.fault is not None
        assert event.fault.code == DeadlineExceeded.code
        assert event.request_id == ID
        assert bench.engine.aborted == [engine_id()]
        assert bench.sessions.requests.find(RequestId("alone"), Generation(1)) is not None
        await bench.report(engine_id(), 1, finish=FinishReason.CANCELLED)
        assert bench.link.aborted == [(T, 1, "deadline_exceeded")]
        watch.cancel()


async def test_a_draining_worker_refuses_new_work_and_becomes_idle_with_the_last_of_the_old() -> None:
    async with worker_bench() as bench:
        await DECODE.submit(bench.sessions, decode(ticket=False))
        bench.sessions.draining = True
        with pytest.raises(Draining):
            await DECODE.submit(bench.sessions, decode(2, ticket=False))
        assert not bench.sessions.idle.is_set()
        await bench.report(engine_id(), 0, 1, finish=FinishReason.LENGTH)
        assert nothing_held(bench)


async def test_a_flow_is_fetched_anew_only_after_the_engine_has_let_go_of_the_earlier_attempt() -> None:
    """Both attempts' sources have one name at the relay: what ends the first must not end the second."""
    async with worker_bench() as bench, asyncio.TaskGroup() as group:
        await DECODE.submit(bench.sessions, decode(1))
        first = bench.link.transfers[T]
        ticket = KvTicket(transfer_id=T, generation=Generation(1), source=RELAY, manifest=manifest(2), pull=2)
        resumed = decode(2, output_offset=1).model_copy(update={"ticket": ticket})
        submit = group.create_task(DECODE.submit(bench.sessions, resumed))
        await eventually(lambda: bench.engine.aborted == [engine_id(1)])
        assert bench.link.transfers[T] is first, "not asked for yet"
        assert not submit.done()
        await bench.report(engine_id(1), 1, finish=FinishReason.CANCELLED)
        await submit
        assert bench.link.aborted == [(T, 1, "cancelled")], "before the second was opened"
        assert bench.link.transfers[T] is not first
        assert bench.engine.held[engine_id(2)].kv_load is bench.link.transfers[T].source


async def test_kv_that_an_earlier_attempt_has_taken_over_is_fetched_at_once() -> None:
    async with worker_bench() as bench:
        await DECODE.submit(bench.sessions, decode(1))
        await bench.report(engine_id(1), 1, 9)
        ticket = KvTicket(transfer_id=T, generation=Generation(1), source=RELAY, manifest=manifest(2), pull=2)
        await DECODE.submit(bench.sessions, decode(2, output_offset=1).model_copy(update={"ticket": ticket}))
        await bench.report(engine_id(1), 2, finish=FinishReason.CANCELLED)
        assert bench.link.aborted == [], "the flow is the second attempt's"
