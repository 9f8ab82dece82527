"""What every way between a producer and a consumer keeps: all or a typed error, and nothing held afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from isthmus_kvrelay.core.staging import SlotState
from isthmus_shared.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    IsthmusError,
    ManifestMismatch,
    PartyLost,
    StagingFull,
    StaleParty,
    TransferFailed,
)
from isthmus_shared.ids import Generation, TransferId
from isthmus_testing import eventually
from isthmus_testing.relay import (
    G1,
    SLOT_BYTES,
    client_of,
    manifest_of,
    new_transfer,
    pattern,
    read,
    ticket_for,
    write,
)

SIZE = 10 * SLOT_BYTES + 100
MakeWay = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture
async def way(make_way: MakeWay) -> AsyncIterator[Any]:
    async with make_way() as made:
        yield made


async def open_both(way: Any, size: int = SIZE, *, deadline_s: float = 10, generation: Generation = G1) -> Any:
    transfer = new_transfer()
    sink = await way.producer.open_sink(transfer, generation, manifest_of(size), deadline_s=deadline_s, wait_s=1)
    ticket = ticket_for(way.source.ref, transfer, size, generation)
    source = await way.consumer.open_source(ticket, deadline_s=deadline_s)
    return sink, source


@pytest.mark.parametrize("size", [4, SLOT_BYTES - 4, SLOT_BYTES, SLOT_BYTES + 4, SIZE])
async def test_bytes_arrive_as_they_were_written(way: Any, size: int) -> None:
    sink, source = await open_both(way, size)
    write(sink, pattern(size))
    sink.seal()
    async with asyncio.timeout(10):
        await source.ready()
    assert read(source) == pattern(size)
    source.release()
    await way.at_rest()


async def test_parts_filled_out_of_order_and_across_chunks_arrive_in_place(way: Any) -> None:
    sink, source = await open_both(way)
    data = pattern(SIZE)
    for start in (SLOT_BYTES * 3 + 7, 0):
        end = SIZE if start else SLOT_BYTES * 3 + 7
        write(sink, data[start:end], start)
    sink.seal()
    await source.ready()
    assert read(source) == data
    assert b"".join(source.map(SLOT_BYTES - 3, 10)) == data[SLOT_BYTES - 3 : SLOT_BYTES + 7]
    source.release()
    await way.at_rest()


async def test_a_source_is_not_ready_before_the_last_byte_is_filled(way: Any) -> None:
    sink, source = await open_both(way)
    data = pattern(SIZE)
    write(sink, data[:-4])
    with pytest.raises(TransferFailed, match="4 bytes are not filled"):
        sink.seal()
    waiting = asyncio.create_task(source.ready())
    await eventually(lambda: way.target is way.source or way.target.daemon.stats().received_bytes >= SLOT_BYTES * 10)
    assert not waiting.done()
    write(sink, data[-4:], SIZE - 4)
    await waiting
    assert read(source) == data
    source.release()
    sink.seal()
    await way.at_rest()


async def test_views_of_a_source_are_read_only(way: Any) -> None:
    sink, source = await open_both(way)
    write(sink, pattern(SIZE))
    sink.seal()
    await source.ready()
    assert all(view.readonly for view in source.map(0, SIZE))
    source.release()
    with pytest.raises(TransferFailed):
        source.map(0, 1)
    await way.at_rest()


async def test_an_abort_by_the_producer_reaches_the_consumer(way: Any) -> None:
    sink, source = await open_both(way)
    write(sink, pattern(SLOT_BYTES))
    sink.abort(Cancelled("the client left").to_fault())
    with pytest.raises(Cancelled, match="the client left"):
        await source.ready()
    source.release()
    await way.at_rest()


async def test_an_abort_after_the_seal_frees_what_was_staged(way: Any) -> None:
    transfer = new_transfer()
    sink = await way.producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=10, wait_s=1)
    write(sink, pattern(SIZE))
    sink.seal()
    sink.abort(Cancelled("too late").to_fault())
    await eventually(lambda: way.source.daemon.stats().slots[SlotState.HELD] == 11)
    await way.producer.abort(transfer, G1, Cancelled("finished early").to_fault())
    await way.at_rest()
    source = await way.consumer.open_source(ticket_for(way.source.ref, transfer, SIZE), deadline_s=5)
    with pytest.raises(Cancelled, match="finished early"):
        await source.ready()
    source.release()


async def test_a_consumer_that_gives_up_ends_the_producer_too(way: Any) -> None:
    sink, source = await open_both(way)
    write(sink, pattern(SLOT_BYTES))
    source.release()
    with pytest.raises(Cancelled):
        await source.ready()
    await eventually(lambda: _ended(sink), what="the sink to end")
    await way.at_rest()


def _ended(sink: Any) -> bool:
    try:
        sink.map(0, 1)
    except TransferFailed:
        return True
    return False


async def test_an_unknown_abort_does_nothing(way: Any) -> None:
    await way.producer.abort(TransferId("nobody"), G1, Cancelled("x").to_fault())
    sink, source = await open_both(way)
    write(sink, pattern(SIZE))
    sink.seal()
    await source.ready()
    source.release()
    await way.at_rest()


async def test_a_producer_that_dies_before_the_seal_fails_its_consumer_at_once(make_way: MakeWay) -> None:
    async with make_way() as way, client_of(way.source, "doomed") as doomed:
        transfer = new_transfer()
        sink = await doomed.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=60, wait_s=1)
        source = await way.consumer.open_source(ticket_for(way.source.ref, transfer, SIZE), deadline_s=60)
        write(sink, pattern(SLOT_BYTES * 3))
        await eventually(lambda: way.source.daemon.stats().slots[SlotState.HELD] == 3)
        await doomed.close()
        async with asyncio.timeout(5):
            with pytest.raises(PartyLost):
                await source.ready()
        source.release()
        await way.at_rest()


async def test_a_producer_that_dies_after_the_seal_does_not_matter(make_way: MakeWay) -> None:
    async with make_way() as way, client_of(way.source, "doomed") as doomed:
        transfer = new_transfer()
        sink = await doomed.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=60, wait_s=1)
        write(sink, pattern(SIZE))
        sink.seal()
        await doomed.close()
        source = await way.consumer.open_source(ticket_for(way.source.ref, transfer, SIZE), deadline_s=60)
        await source.ready()
        assert read(source) == pattern(SIZE)
        source.release()
        await way.at_rest()


@pytest.mark.parametrize("arrived", [False, True])
async def test_a_consumer_that_dies_frees_both_ends(make_way: MakeWay, arrived: bool) -> None:
    async with make_way() as way, client_of(way.target, "doomed") as doomed:
        transfer = new_transfer()
        sink = await way.producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=60, wait_s=1)
        source = await doomed.open_source(ticket_for(way.source.ref, transfer, SIZE), deadline_s=60)
        write(sink, pattern(SIZE if arrived else SLOT_BYTES * 2))
        if arrived:
            sink.seal()
            await source.ready()
        await doomed.close()
        await eventually(lambda: arrived or _ended(sink))
        await way.at_rest()


async def test_the_same_generation_is_not_opened_twice(way: Any) -> None:
    sink, source = await open_both(way)
    write(sink, pattern(SIZE))
    sink.seal()
    await source.ready()
    source.release()
    await way.at_rest()
    with pytest.raises(StaleParty):
        await way.producer.open_sink(sink.key.transfer_id, G1, manifest_of(SIZE), deadline_s=5, wait_s=1)
    again = await way.consumer.open_source(ticket_for(way.source.ref, sink.key.transfer_id, SIZE), deadline_s=5)
    with pytest.raises(StaleParty):
        await again.ready()
    again.release()


async def test_a_newer_generation_replaces_the_older(way: Any) -> None:
    sink, source = await open_both(way)
    transfer, two = sink.key.transfer_id, Generation(2)
    newer = await way.producer.open_sink(transfer, two, manifest_of(SIZE), deadline_s=10, wait_s=1)
    with pytest.raises(StaleParty):
        await source.ready()
    source.release()
    assert _ended(sink)
    taken = await way.consumer.open_source(ticket_for(way.source.ref, transfer, SIZE, two), deadline_s=10)
    write(newer, pattern(SIZE, seed=2))
    newer.seal()
    await taken.ready()
    assert read(taken) == pattern(SIZE, seed=2)
    taken.release()
    await way.at_rest()


async def test_a_ticket_of_another_life_is_refused(way: Any) -> None:
    stale = way.source.ref.model_copy(update={"incarnation": "a life long gone"})
    source = await way.consumer.open_source(ticket_for(stale, new_transfer(), SIZE), deadline_s=10)
    with pytest.raises(StaleParty):
        await source.ready()
    source.release()
    await way.at_rest()


async def test_a_transfer_that_nobody_offered_is_refused(way: Any) -> None:
    source = await way.consumer.open_source(ticket_for(way.source.ref, new_transfer(), SIZE), deadline_s=10)
    with pytest.raises(StaleParty):
        await source.ready()
    source.release()
    await way.at_rest()


@pytest.mark.parametrize("other", [manifest_of(SIZE + 4), manifest_of(SIZE, "another-model")])
async def test_a_manifest_that_differs_is_refused_with_both_values(way: Any, other: Any) -> None:
    transfer = new_transfer()
    sink = await way.producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=10, wait_s=1)
    ticket = ticket_for(way.source.ref, transfer, SIZE).model_copy(update={"manifest": other})
    source = await way.consumer.open_source(ticket, deadline_s=10)
    with pytest.raises(ManifestMismatch, match=r"source .*, consumer "):
        await source.ready()
    source.release()
    await eventually(lambda: _ended(sink))
    await way.at_rest()


async def test_both_ends_fail_at_the_deadline(way: Any) -> None:
    sink, source = await open_both(way, deadline_s=0.2)
    write(sink, pattern(SLOT_BYTES))
    async with asyncio.timeout(5):
        with pytest.raises(DeadlineExceeded):
            await source.ready()
    source.release()
    await eventually(lambda: _ended(sink))
    await way.at_rest()


async def test_slots_under_a_writing_producer_stay_out_of_use_until_it_comes_back(way: Any) -> None:
    transfer = new_transfer()
    sink = await way.producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=10, wait_s=1)
    views = sink.map(0, SIZE)
    await way.producer.abort(transfer, G1, Cancelled("cancelled under its hands").to_fault())
    await eventually(lambda: way.source.daemon.stats().slots[SlotState.QUARANTINED] == 11)
    views[0][:] = bytes(len(views[0]))  # the engine does not know yet; nobody else's bytes are hit
    sink.filled(0, SIZE)
    await way.at_rest()
    with pytest.raises(TransferFailed, match="cancelled under its hands"):
        sink.map(0, 1)


async def test_slots_under_a_reading_consumer_stay_out_of_use_until_it_releases(way: Any) -> None:
    sink, source = await open_both(way)
    write(sink, pattern(SIZE))
    sink.seal()
    await source.ready()
    views = source.map(0, SIZE)
    await way.consumer.abort(source.key.transfer_id, G1, Cancelled("cancelled under its hands").to_fault())
    await eventually(lambda: way.target.daemon.stats().slots[SlotState.QUARANTINED] == 11)
    assert b"".join(views) == pattern(SIZE)
    with pytest.raises(TransferFailed):
        source.map(0, 1)
    source.release()
    await way.at_rest()


async def test_many_flows_at_once_each_get_their_own_bytes(make_way: MakeWay) -> None:
    async with make_way(total_slots=32) as way:

        async def one(seed: int) -> None:
            size = 4 * (seed * 331 % 4000 + 1)
            transfer = new_transfer()
            sink = await way.producer.open_sink(transfer, G1, manifest_of(size), deadline_s=30, wait_s=20)
            source = await way.consumer.open_source(ticket_for(way.source.ref, transfer, size), deadline_s=30)
            await asyncio.to_thread(write, sink, pattern(size, seed))
            await asyncio.to_thread(sink.seal)
            await source.ready()
            assert await asyncio.to_thread(read, source) == pattern(size, seed)
            source.release()

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            for seed in range(60):
                group.create_task(one(seed))
        await way.at_rest()
        assert way.target.daemon.stats().delivered_in == 60


async def test_a_sink_waits_for_room_and_then_for_no_longer_than_it_said(make_way: MakeWay) -> None:
    async with make_way(total_slots=8) as way:
        size = 4 * SLOT_BYTES
        first = await way.producer.open_sink(new_transfer(), G1, manifest_of(size), deadline_s=30, wait_s=1)
        with pytest.raises(StagingFull):
            await way.producer.open_sink(new_transfer(), G1, manifest_of(4), deadline_s=30, wait_s=0.05)
        waiting = asyncio.create_task(
            way.producer.open_sink(new_transfer(), G1, manifest_of(size), deadline_s=30, wait_s=10)
        )
        first.abort(Cancelled("room for the next").to_fault())
        (await waiting).abort(Cancelled("done").to_fault())
        await way.at_rest()


async def test_a_transfer_larger_than_the_out_share_is_invalid(make_way: MakeWay) -> None:
    async with make_way(total_slots=8) as way:
        with pytest.raises(InvalidRequest) as caught:
            await way.producer.open_sink(new_transfer(), G1, manifest_of(5 * SLOT_BYTES), deadline_s=5, wait_s=1)
        assert caught.value.param == "total_bytes"


async def test_a_cancelled_open_leaves_nothing_behind(make_way: MakeWay) -> None:
    async with make_way(total_slots=8) as way:
        first = await way.producer.open_sink(new_transfer(), G1, manifest_of(4 * SLOT_BYTES), deadline_s=30, wait_s=1)
        waiting = asyncio.create_task(
            way.producer.open_sink(new_transfer(), G1, manifest_of(4), deadline_s=30, wait_s=10)
        )
        await eventually(lambda: way.source.daemon.stats().flows_out == 2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        first.abort(Cancelled("x").to_fault())
        await way.at_rest()


async def test_two_nodes_that_send_to_each_other_cannot_starve_each_other(make_way: MakeWay) -> None:
    async with make_way(total_slots=8) as way:

        async def cross(there: Any, back: Any, node: Any, seed: int) -> None:
            size, transfer = 4 * SLOT_BYTES, new_transfer()
            sink = await there.open_sink(transfer, G1, manifest_of(size), deadline_s=30, wait_s=20)
            write(sink, pattern(size, seed))
            sink.seal()
            source = await back.open_source(ticket_for(node.ref, transfer, size), deadline_s=30)
            await source.ready()
            assert read(source) == pattern(size, seed)
            source.release()

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            for seed in range(10):
                group.create_task(cross(way.producer, way.consumer, way.source, seed))
                group.create_task(cross(way.consumer, way.producer, way.target, seed + 100))
        await way.at_rest()


async def test_everything_open_fails_when_the_relay_stops(make_way: MakeWay) -> None:
    async with make_way() as way:
        sink, source = await open_both(way, deadline_s=60)
        await way.source.daemon.stop()
        async with asyncio.timeout(5):
            await way.producer.lost.wait()
            with pytest.raises(IsthmusError) as caught:
                await source.ready()
        assert caught.value.code in ("party_lost", "draining")
        with pytest.raises(TransferFailed):
            sink.map(0, 4)
        with pytest.raises(PartyLost):
            await way.producer.open_sink(new_transfer(), G1, manifest_of(4), deadline_s=5, wait_s=1)
        source.release()


@pytest.mark.parametrize(("field", "bad"), [("transfer_id", "x" * 201), ("deadline_s", 0.0), ("wait_s", -1.0)])
async def test_what_the_protocol_cannot_carry_is_an_invalid_request(way: Any, field: str, bad: Any) -> None:
    asked = {"transfer_id": new_transfer(), "deadline_s": 5.0, "wait_s": 1.0} | {field: bad}
    transfer = asked.pop("transfer_id")
    with pytest.raises(InvalidRequest) as caught:
        await way.producer.open_sink(transfer, G1, manifest_of(4), **asked)
    assert caught.value.param == field
    await way.at_rest()
