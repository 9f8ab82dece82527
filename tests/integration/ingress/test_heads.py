"""A request's head is bounded in time and size: connections that never ask for anything do not pile up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from isthmus_ingress.http_connection import MAX_HEAD_BYTES
from isthmus_ingress.http_exchange import Receive, Scope, Send
from isthmus_ingress.http_server import ApiServer, listen
from isthmus_ingress.http_wire import send_json

WAIT_S = 20.0
LATE_S = 0.2
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send_json(send, 200, b"{}", {})


@asynccontextmanager
async def connection(
    head_timeout_s: float, **limits: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """To a server that answers everything with {}."""
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        server = ApiServer(app, grace_s=1, head_timeout_s=head_timeout_s, **limits)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=[listener]))
            reader, writer = await asyncio.open_connection(host, port)
            try:
                yield reader, writer
            finally:
                writer.close()
                await writer.wait_closed()
                server.stop()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([b""], b""),
        ([b"\r\n"], b""),
        ([b"GET / HTT"], b"HTTP/1.1 408 "),
        ([b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: a"], b"HTTP/1.1 408 "),
    ],
)
async def test_a_head_that_does_not_come_in_time_ends_its_connection(sent: Sequence[bytes], status: bytes) -> None:
    async with connection(LATE_S) as (reader, writer):
        writer.writelines(sent)
        answer = await reader.read()
    assert answer.startswith(status)
    assert bool(answer) is bool(status)


async def test_it_is_the_same_for_a_connections_second_request() -> None:
    async with connection(LATE_S) as (reader, writer):
        writer.write(ASK)
        assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200 ")
        writer.write(ASK[:9])
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


async def test_what_is_too_large_for_a_head_is_refused_by_that_name() -> None:
    one = b"GET / HTTP/1.1\r\nx-large: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n"
    many = b"GET / HTTP/1.1\r\n" + b"x-small: a\r\n" * (MAX_HEAD_BYTES // 8) + b"\r\n"
    tiny = b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 2100 + b"\r\n"  # of few bytes, and of many objects
    for head in (one, many, tiny):
        async with connection(WAIT_S) as (reader, writer):
            writer.write(head)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 431 ")
            assert b"headers_too_large" in await reader.read()


async def test_a_header_that_never_ends_is_refused_while_it_comes() -> None:
    async with connection(WAIT_S) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nx-endless: ")
        refused = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        sent_bytes = 0
        while not refused.done() and sent_bytes < 64 * MAX_HEAD_BYTES:
            writer.write(b"a" * 4096)
            sent_bytes += 4096
            await asyncio.wait({refused}, timeout=0.001)
        assert (await refused).startswith(b"HTTP/1.1 431 ")
        assert sent_bytes < 64 * MAX_HEAD_BYTES


async def test_a_head_below_the_bound_is_answered_and_the_connection_stays() -> None:
    async with connection(WAIT_S) as (reader, writer):
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nx-large: " + b"a" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n")
            assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200 ")


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    async with connection(WAIT_S, keep_alive_s=LATE_S) as (reader, writer):
        for _ in range(3):
            writer.write(ASK)
            assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200 ")
        assert await reader.read() == b""


async def test_one_connection_too_many_is_told_so_and_the_others_stay() -> None:
    async with connection(WAIT_S, max_connections=1) as (reader, writer):
        writer.write(ASK)
        assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200 ")
        host, port = writer.get_extra_info("peername")
        second, too_many = await asyncio.open_connection(host, port)
        refusal = await second.read()
        assert refusal.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_connections" in refusal
        assert b"\r\nretry-after: 1\r\n" in refusal
        too_many.close()
        await too_many.wait_closed()
        writer.write(ASK)
        assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: -1\r\n",
        b"content-length: 1e3\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding : chunked\r\n",
        b" content-length: 5\r\n",
    ],
)
async def test_a_body_whose_end_two_readers_would_see_differently_is_refused(framing: bytes) -> None:
    """What a proxy in front would take for one request, and this server for two, or the other way round."""
    async with connection(WAIT_S) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n0\r\n\r\nGET /stolen HTTP/1.1\r\n\r\n")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
