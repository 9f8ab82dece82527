"""What our client says to a server, byte by byte: a server of a few lines that knows the protocol's beginning."""

from __future__ import annotations

import asyncio
import json

from isthmus_shared.bus.nats import NatsBus

WAIT_S = 20.0
INFO = b"INFO " + json.dumps({"server_id": "x", "version": "2.10.0", "max_payload": 1 << 20, "headers": True}).encode()


async def test_a_subscription_that_only_the_server_knows_is_withdrawn() -> None:
    withdrawn: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO + b"\r\n")
        inbox = b""
        while line := await reader.readline():
            verb, *words = line.split()
            if verb == b"PING":
                writer.write(b"PONG\r\n")
            elif verb == b"SUB":
                inbox = words[-1]
            elif verb == b"PUB":  # what the client says to itself, to know that it was heard; and a stranger before it
                await reader.readexactly(int(words[-1]) + 2)
                writer.write(b"MSG given.up 99 1\r\nx\r\n")
                writer.write(b"MSG %b %b 0\r\n\r\n" % (words[0], inbox))
            elif verb == b"UNSUB" and not withdrawn.done():
                withdrawn.set_result(words[0])
        writer.close()

    async with asyncio.timeout(WAIT_S), await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with await NatsBus.connect(f"nats://{host}:{port}", name="test"):
            assert await withdrawn == b"99"
