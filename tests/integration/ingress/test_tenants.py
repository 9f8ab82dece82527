"""Keys with quotas at both front doors: what a tenant may use, what it is told, and what is never shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus_ingress.service import Ingress
from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.messages import subjects
from isthmus_shared.prefix import prefix_hashes
from isthmus_testing.fake_cluster import EOS_TOKEN_ID, FakeCluster, say
from isthmus_testing.ingress import ingress_stack
from isthmus_testing.waiting import eventually

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ACME, OTHER = "sk-acme-0123456789", "sk-other-0123456789"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def served(
    folder: Path, **acme: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Ingress, MemoryBroker, FakeCluster]]:
    """An endpoint for `acme`, with those limits, and for `other`, without any. `acme` may also take `tokens`."""
    script = acme.pop("tokens", say("ok"))
    lines = [{"name": "acme", "key": ACME, "slo_class": "interactive", **acme}, {"name": "other", "key": OTHER}]
    path = folder / "tenants.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    async with (
        ingress_stack(folder, "ok", settings={"tenants": path}, tokens=script) as (ingress, cluster, broker),
        httpx.AsyncClient(base_url=f"http://{ingress.address}", timeout=20) as http,
    ):
        yield http, ingress, broker, cluster


async def test_a_tenant_is_refused_beyond_its_rate_and_told_when_to_come_back(folder: Path) -> None:
    async with served(folder, requests_per_min=2) as (http, ingress, _, _cluster):
        for remaining in ("1", "0"):
            answer = await http.post(CHAT, json=GOOD, headers=bearer(ACME))
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == remaining
        refused = await http.post(CHAT, json=GOOD, headers=bearer(ACME))
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "requests per minute of acme" in error["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 31
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        for _ in range(5):  # somebody else is not slowed
            answer = await http.post(CHAT, json=GOOD, headers=bearer(OTHER))
            assert answer.status_code == 200
            assert not any(name.startswith("x-ratelimit") for name in answer.headers)
        said = ingress.runtime.metrics.exposition().decode()
        assert 'isthmus_tenant_requests_total{outcome="ok",tenant="acme"} 2.0' in said
        assert 'isthmus_tenant_requests_total{outcome="ok",tenant="other"} 5.0' in said
        assert ACME not in said
        assert OTHER not in said


async def test_tokens_of_prompt_and_answer_count(folder: Path) -> None:
    async with served(folder, tokens_per_min=60, tokens=say("x" * 100)) as (http, *_):
        body = {**GOOD, "max_tokens": 50, "stream": True}
        streamed = await http.post(CHAT, json=body, headers=bearer(ACME))
        assert streamed.status_code == 200
        assert int(streamed.headers["x-ratelimit-remaining-tokens"]) < 60  # the prompt's are taken
        refused = await http.post(CHAT, json=body, headers=bearer(ACME))
        assert refused.status_code == 429
        assert "tokens per minute" in refused.json()["error"]["message"]


async def test_places_are_freed_however_a_request_ends(folder: Path) -> None:
    async with served(folder, max_concurrent=1, tokens=say("abcd")) as (http, _, _broker, cluster):
        cluster.workers["d1"].faults.stall_after = 2
        async with http.stream("POST", CHAT, json={**GOOD, "stream": True}, headers=bearer(ACME)) as stream:
            assert stream.status_code == 200
            refused = await http.post(CHAT, json=GOOD, headers=bearer(ACME))
            assert refused.status_code == 429
            assert "concurrent" in refused.json()["error"]["message"]
        await eventually(lambda: cluster.held == {}, what="the end of what the client left")
        assert (await http.post(CHAT, json={**GOOD, "max_tokens": 1}, headers=bearer(ACME))).status_code == 200
        assert (await http.post(CHAT, json={**GOOD, "n": 99}, headers=bearer(ACME))).status_code == 400
        assert (await http.post(CHAT, json={**GOOD, "max_tokens": 1}, headers=bearer(ACME))).status_code == 200


@pytest.mark.parametrize("subject", [subjects.API_CHAT, subjects.API_MODELS])
async def test_the_bus_door_asks_for_the_same_keys(folder: Path, subject: str) -> None:
    async with served(folder, requests_per_min=1) as (_http, _, broker, _cluster):
        bus = broker.client()
        data = json.dumps(GOOD).encode()
        for headers in ({}, {"authorization": "Bearer nothing-of-ours-at-all"}):
            refused = await bus.request(subject, data, timeout_s=5, headers=headers)
            assert refused.headers["isthmus-status"] == "401"
        answer = await bus.request(subject, data, timeout_s=5, headers=bearer(ACME))
        assert "isthmus-status" not in answer.headers


async def test_both_doors_draw_on_one_quota(folder: Path) -> None:
    async with served(folder, requests_per_min=1) as (http, _, broker, _cluster):
        data = json.dumps(GOOD).encode()
        answer = await broker.client().request(subjects.API_CHAT, data, timeout_s=5, headers=bearer(ACME))
        assert "isthmus-status" not in answer.headers
        assert (await http.post(CHAT, json=GOOD, headers=bearer(ACME))).status_code == 429


async def test_wrong_keys_of_any_form_are_no_bug(folder: Path) -> None:
    async with served(folder) as (http, *_):
        for given in (b"Bearer \xff\xfe", b"Bearer " + b"k" * 10_000, b"\xe2\x82\xac", b"Bearer\t" + ACME.encode()):
            async with asyncio.timeout(10):
                answer = await http.post(CHAT, json=GOOD, headers={b"authorization": given})
            assert answer.status_code == 401


async def test_a_tenants_prefixes_are_its_own_from_the_door_to_the_workers(folder: Path) -> None:
    long = {**GOOD, "messages": [{"role": "user", "content": "x" * 200}]}
    async with served(folder) as (http, _, _broker, cluster):
        for body, key in ((long, ACME), (long, ACME), (long, OTHER), (long | {"cache_salt": "mine"}, ACME)):
            assert (await http.post(CHAT, json=body, headers=bearer(key))).status_code == 200
        salts = [submit.cache_salt for submit in cluster.workers["p1"].submits]
        assert salts == [submit.cache_salt for submit in cluster.workers["d1"].submits]
        assert salts[0] == salts[1] == "acme"
        assert len(set(salts)) == 3
        prefixes = [route.prefix for route in cluster.routes]
        prompt = cluster.workers["p1"].submits[0].token_ids
        assert prefixes == [prefix_hashes(prompt, salt) for salt in salts]
        assert len(prefixes[0]) == 3
        refused = await http.post(CHAT, json=GOOD | {"cache_salt": ""}, headers=bearer(ACME))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


async def test_many_large_bodies_at_once_are_refused_before_they_are_held(folder: Path) -> None:
    """Each alone would do: what counts is what they hold together while they come."""
    async with ingress_stack(folder, "ok", settings={"max_bodies_bytes": 300_000}) as (ingress, _, broker):
        large = json.dumps({**GOOD, "messages": [{"role": "user", "content": "x" * 200_000}]}).encode()
        host, port = str(ingress.address).split(":")
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(large)}\r\n\r\n".encode()
            writer.write(head + large[:-1])
            frontend = ingress.frontend
            assert frontend is not None
            await eventually(lambda: frontend.bodies.held_bytes >= len(large) - 1, what="all of it but a byte is held")
            async with httpx.AsyncClient(base_url=f"http://{ingress.address}", timeout=20) as http:
                refused = await http.post(CHAT, content=large)
                assert refused.status_code == 429
                assert "reading" in refused.json()["error"]["message"]
                told = await broker.client().request(subjects.API_CHAT, large, timeout_s=10)
                assert told.headers["isthmus-status"] == "429"
                assert (await http.post(CHAT, json=GOOD)).status_code == 200  # a small one finds room
                writer.write(large[-1:])
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")  # too long for this model
                writer.close()
                await writer.wait_closed()
            assert frontend.bodies.held_bytes == 0


async def test_one_request_id_for_two_requests_mixes_nothing_up(folder: Path) -> None:
    """A client may choose its id, and so choose another's."""

    def echo(prompt: tuple[int, ...], index: int) -> int:
        return prompt[index] if index < 4 else EOS_TOKEN_ID

    async with served(folder, tokens=echo) as (http, *_):

        async def ask(key: str, text: str) -> str:
            body = {"model": "tiny", "prompt": list(text.encode()), "max_tokens": 4}
            headers = {**bearer(key), "x-request-id": "req-of-acme"}
            answer = await http.post("/v1/completions", json=body, headers=headers)
            found: str = answer.json()["choices"][0]["text"]
            return found

        asked = [(key, f"{number:02}{key[3:5]}") for number in range(20) for key in (ACME, OTHER)]
        answers = await asyncio.gather(*(ask(key, text) for key, text in asked))
        assert answers == [text for _, text in asked]
