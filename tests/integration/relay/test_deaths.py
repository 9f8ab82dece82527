"""Real processes die in the middle of transfers: typed errors at once, and nothing held afterwards."""

from __future__ import annotations

import asyncio
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from isthmus_shared.bus.server import EmbeddedNats
from isthmus_shared.errors import Draining, IsthmusError, PartyLost, StaleParty, TransferFailed
from isthmus_testing import eventually
from isthmus_testing.relay import G1, manifest_of, new_transfer, pattern, read, ticket_for, write

SIZE = 10 * 4096
StartRelay = Callable[[str], AbstractAsyncContextManager[Any]]


async def test_a_transfer_crosses_two_processes(start_relay: StartRelay, watch: Any) -> None:
    async with start_relay("a") as a, start_relay("b") as b:
        producer, consumer = await a.connect("p"), await b.connect("c")
        transfer = new_transfer()
        sink = await producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=30, wait_s=1)
        source = await consumer.open_source(ticket_for(producer.relay, transfer, SIZE), deadline_s=30)
        await asyncio.to_thread(write, sink, pattern(SIZE))
        await asyncio.to_thread(sink.seal)
        await source.ready()
        assert await asyncio.to_thread(read, source) == pattern(SIZE)
        await eventually(lambda: watch.clients("a") == {"p"})
        source.release()
        await eventually(lambda: watch.received_bytes("b") == SIZE and watch.at_rest("a") and watch.at_rest("b"))
        await producer.close()
        await consumer.close()
        await eventually(lambda: not watch.clients("a"))
        assert watch.losses == []
        assert stat.S_IMODE(a.socket.stat().st_mode) == 0o600


async def test_killing_the_source_relay_fails_everybody_at_once_and_a_new_one_takes_its_place(
    start_relay: StartRelay, watch: Any
) -> None:
    async with start_relay("b") as b, start_relay("a") as a:
        producer, consumer = await a.connect(), await b.connect()
        transfer = new_transfer()
        sink = await producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=120, wait_s=1)
        ticket = ticket_for(producer.relay, transfer, SIZE)
        source = await consumer.open_source(ticket, deadline_s=120)
        write(sink, pattern(SIZE)[: SIZE // 2])
        await eventually(lambda: watch.received_bytes("b") >= SIZE // 2 - 4096)
        await a.end(signal.SIGKILL)
        async with asyncio.timeout(5):
            with pytest.raises(PartyLost):
                await source.ready()
            await producer.lost.wait()
        with pytest.raises(TransferFailed):
            sink.map(0, 1)
        with pytest.raises(PartyLost):
            await producer.open_sink(new_transfer(), G1, manifest_of(SIZE), deadline_s=5, wait_s=1)
        source.release()
        await eventually(lambda: watch.at_rest("b"))
        assert a.socket.exists(), "what a killed relay leaves on disk is its socket's name"
        async with start_relay("a") as again:  # the same socket path
            assert again.socket == a.socket
            anew = await again.connect()
            await refused_at_once(consumer, ticket, PartyLost)
            now_there = ticket.model_copy(
                update={"source": ticket.source.model_copy(update={"address": anew.relay.address})}
            )
            await refused_at_once(consumer, now_there.model_copy(update={"generation": 3}), StaleParty)
            fresh = new_transfer()
            sink = await anew.open_sink(fresh, G1, manifest_of(SIZE), deadline_s=30, wait_s=1)
            source = await consumer.open_source(ticket_for(anew.relay, fresh, SIZE), deadline_s=30)
            write(sink, pattern(SIZE))
            sink.seal()
            await source.ready()
            assert read(source) == pattern(SIZE)
            source.release()
            await eventually(lambda: watch.at_rest("a") and watch.at_rest("b"))
            for client in (anew, producer, consumer):
                await client.close()


async def refused_at_once(consumer: Any, ticket: Any, error: type[IsthmusError]) -> None:
    source = await consumer.open_source(ticket.model_copy(update={"generation": ticket.generation + 1}), deadline_s=60)
    async with asyncio.timeout(5):
        with pytest.raises(error):
            await source.ready()
    source.release()


async def test_killing_the_target_relay_frees_the_source(start_relay: StartRelay, watch: Any) -> None:
    async with start_relay("a") as a, start_relay("b") as b:
        producer, consumer = await a.connect(), await b.connect()
        transfer = new_transfer()
        sink = await producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=120, wait_s=1)
        source = await consumer.open_source(ticket_for(producer.relay, transfer, SIZE), deadline_s=120)
        write(sink, pattern(SIZE)[: SIZE // 2])
        await eventually(lambda: watch.received_bytes("b") >= SIZE // 2 - 4096)
        await b.end(signal.SIGKILL)
        async with asyncio.timeout(5):
            await consumer.lost.wait()
            with pytest.raises(PartyLost):
                await source.ready()
        await eventually(lambda: watch.at_rest("a"))
        with pytest.raises(TransferFailed):
            sink.map(0, 1)
        await producer.close()
        await consumer.close()


@pytest.mark.parametrize("filled", [SIZE // 2, SIZE])
async def test_killing_a_producer_process_frees_what_it_had_not_sealed_and_is_news(
    start_relay: StartRelay, watch: Any, filled: int
) -> None:
    async with start_relay("a") as a, start_relay("b") as b:
        consumer = await b.connect()
        bystander = await a.connect("bystander")
        transfer = new_transfer()
        doomed = await start_producer(a, transfer, filled)
        source = await consumer.open_source(ticket_for(bystander.relay, transfer, SIZE), deadline_s=60)
        await eventually(lambda: watch.received_bytes("b") >= filled - 4096)
        doomed.kill()
        await doomed.wait()
        async with asyncio.timeout(5):
            if filled == SIZE:
                await source.ready()
                assert read(source) == pattern(SIZE)
            else:
                with pytest.raises(PartyLost):
                    await source.ready()
        source.release()
        await eventually(lambda: [loss.worker.worker_id for loss in watch.losses] == ["doomed"])
        await eventually(lambda: watch.at_rest("a") and watch.at_rest("b"))
        assert watch.clients("a") == {"bystander"}
        await consumer.close()
        await bystander.close()


async def start_producer(relay: Any, transfer: str, filled: int) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "isthmus_testing.relay_client_process"),
        *(str(relay.socket), transfer, str(SIZE), str(filled)),
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        assert await process.stdout.readline() == b"ready\n"
    return process


async def test_the_news_of_a_death_waits_for_the_bus(
    start_relay: StartRelay, watch: Any, nats_server: EmbeddedNats
) -> None:
    async with start_relay("a") as a:
        doomed = await start_producer(a, new_transfer(), SIZE // 2)
        await nats_server.stop(kill=True)
        doomed.kill()
        await doomed.wait()
        await eventually(lambda: "client.left" in a.log.read_text())
        await nats_server.start()
        await eventually(lambda: [loss.worker.worker_id for loss in watch.losses] == ["doomed"], 30)
        await eventually(lambda: watch.at_rest("a"), 30)


async def test_sigterm_lets_what_is_open_finish_and_nothing_new_begin(start_relay: StartRelay, watch: Any) -> None:
    async with start_relay("a") as a, start_relay("b") as b:
        producer, consumer = await a.connect(), await b.connect()
        transfer = new_transfer()
        sink = await producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=60, wait_s=1)
        ticket = ticket_for(producer.relay, transfer, SIZE)
        a.process.send_signal(signal.SIGTERM)
        await eventually(lambda: "a" in watch.beats and watch.beats["a"].state == "draining")
        with pytest.raises(Draining):
            await producer.open_sink(new_transfer(), G1, manifest_of(4), deadline_s=5, wait_s=1)
        source = await consumer.open_source(ticket, deadline_s=60)
        write(sink, pattern(SIZE))
        sink.seal()
        await source.ready()
        assert read(source) == pattern(SIZE)
        source.release()
        async with asyncio.timeout(10):
            assert await a.process.wait() == 0
            await producer.lost.wait()
        assert not a.socket.exists()
        assert watch.losses == []
        await producer.close()
        await consumer.close()


async def test_garbage_closes_the_client_that_sent_it_and_nobody_else(start_relay: StartRelay, watch: Any) -> None:
    async with start_relay("a") as a:
        good = await a.connect("good")
        reader, writer = await asyncio.open_unix_connection(str(a.socket))
        writer.write(b"\x00\x00\x00\x05hello")
        await writer.drain()
        async with asyncio.timeout(5):
            assert b"protocol_violation" in await reader.read()
        writer.close()
        sink = await good.open_sink(new_transfer(), G1, manifest_of(SIZE), deadline_s=60, wait_s=1)
        sink.abort(PartyLost("x").to_fault())
        await eventually(lambda: watch.clients("a") and watch.at_rest("a"))
        await good.close()
