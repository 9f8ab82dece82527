from __future__ import annotations

import asyncio

from isthmus_cli.readiness import endpoint_ready

HEAD = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


async def test_an_endpoint_that_knows_no_worker_yet_is_not_told_to_be_ready() -> None:
    answers = [HEAD % b"503 Service Unavailable", b"", HEAD % b"200 OK"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /ready ")
        writer.write(answers.pop(0))
        writer.close()
        await writer.wait_closed()

    async with asyncio.timeout(20), await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        await endpoint_ready(f"http://{host}:{port}")
    assert answers == []
