"""What TCP adds to the contract: strangers, damage, silence, cuts, and no thread or descriptor left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

from isthmus_kvrelay import wire
from isthmus_kvrelay.client import RelayClient
from isthmus_kvrelay.core.events import SlotUse
from isthmus_kvrelay.framing import pack
from isthmus_kvrelay.transports.handshake import NONCE_BYTES, DialerProof, Identity, NotAuthentic, dial_in
from isthmus_shared.errors import ChecksumMismatch, IsthmusError, PartyLost, Retry, StaleParty, TransferFailed
from isthmus_shared.ids import Incarnation
from isthmus_testing import eventually
from isthmus_testing.relay import (
    G1,
    SECRET,
    SLOT_BYTES,
    Node,
    client_of,
    daemon_settings,
    manifest_of,
    new_transfer,
    pattern,
    read,
    running,
    ticket_for,
    write,
)
from isthmus_testing.tcp_proxy import TcpProxy, proxy_to

SIZE = 12 * SLOT_BYTES


@contextlib.asynccontextmanager
async def proxied(folder: Path, **options: Any) -> AsyncIterator[tuple[Node, Node, RelayClient, RelayClient, TcpProxy]]:
    async with contextlib.AsyncExitStack() as stack:
        a = await stack.enter_async_context(running(daemon_settings(folder, "a", **options)))
        b = await stack.enter_async_context(running(daemon_settings(folder, "b", **options)))
        proxy = await stack.enter_async_context(proxy_to(a.ref.address))
        producer = await stack.enter_async_context(client_of(a))
        consumer = await stack.enter_async_context(client_of(b))
        yield a, b, producer, consumer, proxy


async def test_a_damaged_chunk_is_a_checksum_mismatch_at_the_consumer(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (a, b, producer, consumer, proxy):
        transfer = new_transfer()
        sink = await producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=30, wait_s=1)
        write(sink, pattern(SIZE))
        payload = pattern(SIZE)[100:140]

        def flip(data: bytes) -> bytes:
            return data.replace(payload, bytes([payload[0] ^ 1]) + payload[1:])

        proxy.damage = flip
        ticket = ticket_for(a.advertised_as(proxy.address), transfer, SIZE)
        source = await consumer.open_source(ticket, deadline_s=30)
        async with asyncio.timeout(10):
            with pytest.raises(ChecksumMismatch):
                await source.ready()
        source.release()
        await eventually(lambda: a.at_rest() and b.at_rest())
        assert b.daemon.stats().failures == {"checksum_mismatch": 1}


async def test_a_cut_lane_fails_what_is_on_it_at_once_and_the_next_transfer_gets_a_new_one(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (a, b, producer, consumer, proxy):
        for attempt in range(2):
            transfer = new_transfer()
            sink = await producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=60, wait_s=1)
            ticket = ticket_for(a.advertised_as(proxy.address), transfer, SIZE)
            source = await consumer.open_source(ticket, deadline_s=60)
            write(sink, pattern(SIZE // 2))
            await eventually(lambda: b.daemon.stats().credits_outstanding_bytes > 0)
            if attempt == 0:
                proxy.cut()
                async with asyncio.timeout(5):
                    with pytest.raises(PartyLost):
                        await source.ready()
                source.release()
                await eventually(lambda: a.at_rest() and b.at_rest())
            else:
                write(sink, pattern(SIZE)[SIZE // 2 :], SIZE // 2)
                sink.seal()
                await source.ready()
                assert read(source) == pattern(SIZE)
                source.release()
        await eventually(lambda: a.at_rest() and b.at_rest())


async def test_a_silent_lane_is_taken_for_lost(tmp_path: Path) -> None:
    quick = {"ping_interval_s": 0.05, "ping_timeout_s": 0.3}
    async with proxied(tmp_path, tcp=quick) as (a, b, producer, consumer, proxy):
        transfer = new_transfer()
        await producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=60, wait_s=1)
        source = await consumer.open_source(ticket_for(a.advertised_as(proxy.address), transfer, SIZE), deadline_s=60)
        await eventually(lambda: b.daemon.stats().credits_outstanding_bytes > 0)
        proxy.stall()
        async with asyncio.timeout(5):
            with pytest.raises(PartyLost, match="pings"):
                await source.ready()
        source.release()
        await eventually(lambda: a.at_rest() and b.at_rest())


async def test_a_relay_that_is_not_there_is_a_lost_party(tmp_path: Path) -> None:
    async with running(daemon_settings(tmp_path, "b")) as b, client_of(b) as consumer:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            host, port = taken.getsockname()
        gone = b.ref.model_copy(update={"address": f"{host}:{port}", "incarnation": "gone"})
        source = await consumer.open_source(ticket_for(gone, new_transfer(), SIZE), deadline_s=60)
        async with asyncio.timeout(5):
            with pytest.raises(PartyLost, match="cannot be reached"):
                await source.ready()
        source.release()
        assert b.at_rest()


async def test_relays_with_different_secrets_refuse_each_other_and_say_so(tmp_path: Path) -> None:
    seen = LogCapture()
    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[seen])
    async with (
        running(daemon_settings(tmp_path, "a")) as a,
        running(daemon_settings(tmp_path, "b", secret=b"another secret of theirs"), log) as b,
        client_of(a) as producer,
        client_of(b) as consumer,
    ):
        transfer = new_transfer()
        sink = await producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=60, wait_s=1)
        source = await consumer.open_source(ticket_for(a.ref, transfer, SIZE), deadline_s=60)
        with pytest.raises(TransferFailed, match="secret"):
            await source.ready()
        source.release()
        assert a.daemon.stats().lanes == b.daemon.stats().lanes == 0
        assert any(entry["event"] == "lane.dial_failed" for entry in seen.entries)
        sink.abort(PartyLost("x").to_fault())
        await eventually(a.at_rest)


@pytest.mark.parametrize(
    "address", ["", "nowhere", ":1", "host:99999", "h" * 300 + ":1", "a..b:80", "[zz]:1", "é:1", "xn--a:1"]
)
async def test_an_address_that_is_none_fails_the_transfer_and_not_the_relay(tmp_path: Path, address: str) -> None:
    async with running(daemon_settings(tmp_path, "b")) as b, client_of(b) as consumer:
        there = b.ref.model_copy(update={"address": address, "incarnation": "another"})
        source = await consumer.open_source(ticket_for(there, new_transfer(), SIZE), deadline_s=60)
        with pytest.raises(IsthmusError) as caught:
            await source.ready()
        assert caught.value.retry is Retry.ELSEWHERE
        source.release()
        await eventually(b.at_rest)


async def test_a_relay_that_accepts_and_says_nothing_is_a_lost_party(tmp_path: Path) -> None:
    quick = {"handshake_timeout_s": 0.2}
    async with running(daemon_settings(tmp_path, "b", tcp=quick)) as b, client_of(b) as consumer:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            host, port = silent.getsockname()
            there = b.ref.model_copy(update={"address": f"{host}:{port}", "incarnation": "another"})
            source = await consumer.open_source(ticket_for(there, new_transfer(), SIZE), deadline_s=60)
            async with asyncio.timeout(5):
                with pytest.raises(PartyLost, match="did not answer"):
                    await source.ready()
            source.release()
            await eventually(b.at_rest)


async def test_stopping_waits_neither_for_strangers_nor_for_dials(tmp_path: Path) -> None:
    patient = {"handshake_timeout_s": 60.0}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with running(daemon_settings(tmp_path, "b", tcp=patient)) as b, client_of(b) as consumer:
            host, port = silent.getsockname()
            there = b.ref.model_copy(update={"address": f"{host}:{port}", "incarnation": "another"})
            source = await consumer.open_source(ticket_for(there, new_transfer(), SIZE), deadline_s=60)
            with await connect(b.ref.address):
                async with asyncio.timeout(5):
                    await b.daemon.stop()
                    with pytest.raises(IsthmusError):
                        await source.ready()
            source.release()


async def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


async def closed_by_peer(sock: socket.socket) -> bool:
    try:
        async with asyncio.timeout(5):
            while await asyncio.get_running_loop().sock_recv(sock, 65_536):
                pass
    except ConnectionResetError:
        pass
    return True


async def test_a_dialer_without_the_secret_is_refused_with_a_typed_log(tmp_path: Path) -> None:
    seen = LogCapture()
    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[seen])
    async with running(daemon_settings(tmp_path, "a"), log) as a:
        with await connect(a.ref.address) as sock:
            # It lies about knowing the acceptor's proof, so that the acceptor has to judge the dialer's.
            stranger = Identity(Incarnation("stranger"), b"a guess at the secret")
            with pytest.raises(NotAuthentic):
                await dial_in(sock, stranger, wanted=a.ref.incarnation, lane=bytes(NONCE_BYTES), streams=1, stream=0)
            proof = pack(DialerProof(proof=bytes(NONCE_BYTES)))
            await asyncio.get_running_loop().sock_sendall(sock, len(proof).to_bytes(4, "big") + proof)
            assert await closed_by_peer(sock)
        await eventually(lambda: any(entry.get("code") == "not_authentic" for entry in seen.entries))
        assert a.daemon.stats().lanes == 0


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x05hello", b"\xff" * 100])
async def test_a_stranger_is_closed_within_the_handshake_time(tmp_path: Path, words: bytes) -> None:
    async with running(daemon_settings(tmp_path, "a", tcp={"handshake_timeout_s": 0.2})) as a:
        with await connect(a.ref.address) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, words)
            assert await closed_by_peer(sock)


async def test_a_dialer_that_means_another_life_is_told_that_it_is_stale(tmp_path: Path) -> None:
    async with running(daemon_settings(tmp_path, "a")) as a:
        with await connect(a.ref.address) as sock:
            me = Identity(Incarnation("me"), SECRET)
            with pytest.raises(StaleParty):
                await dial_in(sock, me, wanted=Incarnation("old"), lane=bytes(NONCE_BYTES), streams=1, stream=0)


async def test_a_chunk_without_credit_is_dropped_and_counted_and_the_lane_lives(tmp_path: Path) -> None:
    async with running(daemon_settings(tmp_path, "a")) as a:
        me, token = Identity(Incarnation("peer"), SECRET), os.urandom(NONCE_BYTES)
        socks = [await connect(a.ref.address) for _ in range(2)]
        for stream, sock in enumerate(socks):
            await dial_in(sock, me, wanted=a.ref.incarnation, lane=token, streams=1, stream=stream)
        await eventually(lambda: a.daemon.stats().lanes == 1)
        mine, theirs = wire.incarnation_digest(me.incarnation), wire.incarnation_digest(a.ref.incarnation)
        payload = bytes(SLOT_BYTES)
        header = wire.Header(wire.FrameType.CHUNK, len(payload), mine, theirs, into=SlotUse(3, 1), generation=1)
        train = wire.Header(wire.FrameType.TRAIN, wire.HEADER_BYTES, mine, theirs)
        tail = bytes(wire.CHECKSUM_BYTES)
        await asyncio.get_running_loop().sock_sendall(socks[1], train.encode() + header.encode() + payload + tail)
        await eventually(lambda: a.daemon.uncredited_chunks == 1)
        assert a.daemon.stats().lanes == 1
        await asyncio.get_running_loop().sock_sendall(socks[1], b"nonsense" * 20)
        await eventually(lambda: a.daemon.stats().lanes == 0, what="the peer that talks nonsense to be closed")
        for sock in socks:
            sock.close()
        assert a.at_rest()


@pytest.mark.parametrize("size", [0, SLOT_BYTES + 1])
async def test_a_chunk_that_no_slot_can_hold_closes_the_lane(tmp_path: Path, size: int) -> None:
    seen = LogCapture()
    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[seen])
    async with running(daemon_settings(tmp_path, "a"), log) as a:
        me, token = Identity(Incarnation("peer"), SECRET), os.urandom(NONCE_BYTES)
        socks = [await connect(a.ref.address) for _ in range(2)]
        for stream, sock in enumerate(socks):
            await dial_in(sock, me, wanted=a.ref.incarnation, lane=token, streams=1, stream=stream)
        await eventually(lambda: a.daemon.stats().lanes == 1)
        mine, theirs = wire.incarnation_digest(me.incarnation), wire.incarnation_digest(a.ref.incarnation)
        header = wire.Header(wire.FrameType.CHUNK, size, mine, theirs, into=SlotUse(3, 1), generation=1)
        train = wire.Header(wire.FrameType.TRAIN, wire.HEADER_BYTES, mine, theirs)
        await asyncio.get_running_loop().sock_sendall(socks[1], train.encode() + header.encode())
        await eventually(lambda: a.daemon.stats().lanes == 0, what="the peer to be closed")
        assert [each["code"] for each in seen.entries if each["event"] == "lane.closing"] == ["protocol_violation"]
        for sock in socks:
            sock.close()


@pytest.mark.parametrize(("source_compiled", "target_compiled"), [(True, True), (True, False), (False, True)])
async def test_relays_with_and_without_compiled_loops_understand_each_other(
    tmp_path: Path, source_compiled: bool, target_compiled: bool
) -> None:
    seen = LogCapture()
    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[seen])
    async with (
        running(daemon_settings(tmp_path, "a", tcp={"compiled": source_compiled}), log) as a,
        running(daemon_settings(tmp_path, "b", tcp={"compiled": target_compiled}), log) as b,
        client_of(a) as producer,
        client_of(b) as consumer,
    ):

        def loaded() -> bool:
            there = sum(entry["event"] == "relay.compiled_loops" for entry in seen.entries)
            return there == source_compiled + target_compiled

        for attempt in range(3):  # the first while the loops are still being loaded
            transfer = new_transfer()
            sink = await producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=30, wait_s=1)
            write(sink, pattern(SIZE, attempt))
            sink.seal()
            source = await consumer.open_source(ticket_for(a.ref, transfer, SIZE), deadline_s=30)
            await source.ready()
            assert read(source) == pattern(SIZE, attempt)
            source.release()
            await eventually(loaded)
        await eventually(lambda: a.at_rest() and b.at_rest())


async def test_no_thread_and_no_descriptor_is_left(tmp_path: Path) -> None:
    async def once(name: str) -> None:
        folder = tmp_path / name
        async with proxied(folder) as (a, _, producer, consumer, proxy):
            transfer = new_transfer()
            sink = await producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=30, wait_s=1)
            ticket = ticket_for(a.advertised_as(proxy.address), transfer, SIZE)
            source = await consumer.open_source(ticket, deadline_s=30)
            write(sink, pattern(SIZE))
            sink.seal()
            await source.ready()
            source.release()

    await once("first")  # what a first use starts for good (the executor's threads) is not a leak
    fds = len(os.listdir("/proc/self/fd"))
    await once("second")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("relay-")]
    assert len(os.listdir("/proc/self/fd")) <= fds


async def test_a_paced_lane_keeps_to_its_rate(tmp_path: Path) -> None:
    rate, size = 200_000, 24 * SLOT_BYTES
    async with proxied(tmp_path, rate_bytes_per_s=rate) as (a, _, producer, consumer, _):
        transfer = new_transfer()
        sink = await producer.open_sink(transfer, G1, manifest_of(size), deadline_s=30, wait_s=1)
        write(sink, pattern(size))
        sink.seal()
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        source = await consumer.open_source(ticket_for(a.ref, transfer, size), deadline_s=30)
        await source.ready()
        took_s = loop.time() - started_s
        assert took_s >= (size - 4 * SLOT_BYTES) / rate
        assert read(source) == pattern(size)
        source.release()


async def test_a_host_that_starts_no_more_threads_costs_transfers_and_not_the_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at a lane's beginning nor at its end."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with proxied(tmp_path) as (a, b, producer, consumer, proxy):
        for possible in (False, True, True):
            transfer = new_transfer()
            sink = await producer.open_sink(transfer, G1, manifest_of(SIZE), deadline_s=60, wait_s=1)
            write(sink, pattern(SIZE))
            sink.seal()
            with monkeypatch.context() as patched:
                if not possible:
                    patched.setattr(threading.Thread, "start", refuse)
                ticket = ticket_for(a.advertised_as(proxy.address), transfer, SIZE)
                source = await consumer.open_source(ticket, deadline_s=60)
                if possible:
                    await source.ready()
                    assert read(source) == pattern(SIZE)
                else:
                    with pytest.raises(PartyLost):
                        await source.ready()
                    await producer.abort(transfer, G1, PartyLost("nobody takes it").to_fault())
                source.release()
            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", refuse)
                proxy.cut()
                await eventually(lambda: a.at_rest() and b.at_rest())
