"""A client that does not read its stream costs a bounded amount of memory, and then nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

from isthmus_ingress.http_connection import HIGH_WATER_BYTES
from isthmus_ingress.outbox import MAX_UNREAD
from isthmus_testing.fake_cluster import say
from isthmus_testing.ingress import ingress_stack
from isthmus_testing.waiting import eventually

CHAT = "/v1/chat/completions"
CHUNK_BYTES = 1024
"""One token's chunk with its alternatives, and some."""


async def test_what_is_not_read_is_not_held_but_cut(folder: Path) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    data = json.dumps({**body, "logprobs": True, "top_logprobs": 2}).encode()
    script, held = say("x" * 64, eos=None), [0]
    async with ingress_stack(
        folder, "", tokens=script, settings={"write_stall_s": 1.0}, max_model_len_tokens=10_000_000
    ) as (ingress, cluster, _):
        server = ingress.server
        assert server is not None

        def gone() -> bool:
            for connection in server.connections:
                held.append(connection.transport.get_write_buffer_size())
            return len(held) > 1 and not server.connections

        host, port = str(ingress.address).split(":")
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(silent, (host, int(port)))
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
            await loop.sock_sendall(silent, head.encode() + data)
            await eventually(gone, timeout_s=60, what="the connection is cut while its client still holds it open")
        await eventually(lambda: not cluster.held, what="its request is over")
    assert HIGH_WATER_BYTES < max(held) <= HIGH_WATER_BYTES + MAX_UNREAD * CHUNK_BYTES
