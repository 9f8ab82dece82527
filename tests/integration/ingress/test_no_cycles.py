"""A request that has ended is gone: with long streams, what only a full look for cycles would find is found late."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from isthmus_ingress.exchange import Exchange
from isthmus_ingress.http_connection import Connection
from isthmus_ingress.http_exchange import HttpExchange
from isthmus_testing.fake_cluster import say
from isthmus_testing.ingress import ingress_stack
from isthmus_testing.waiting import eventually

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left() -> list[object]:
    return [each for each in gc.get_objects() if isinstance(each, Connection | HttpExchange | Exchange)]


@pytest.mark.usefixtures("no_collection")
async def test_answers_refusals_and_clients_that_left_leave_nothing_to_a_search_for_cycles(folder: Path) -> None:
    async with ingress_stack(folder, "ok", tokens=say("ok" * 30)) as (ingress, _cluster, _broker):
        assert ingress.address is not None
        async with httpx.AsyncClient(base_url=f"http://{ingress.address}", timeout=20) as http:
            for stream in (True, False):
                assert (await http.post(CHAT, json={**BODY, "stream": stream})).status_code == 200
            assert (await http.post(CHAT, json={**BODY, "max_tokens": -1})).status_code == 400
            assert (await http.post(CHAT, content=b"{")).status_code == 400
            assert (await http.get("/v1/models")).status_code == 200
            assert (await http.get("/nothing")).status_code == 404
        host, _, port = ingress.address.rpartition(":")
        data = json.dumps({**BODY, "stream": True}).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + data)
        assert await reader.read(16)
        writer.transport.abort()
        await eventually(lambda: left() == [])
