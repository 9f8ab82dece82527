"""Whatever comes in, an OpenAI-shaped answer that names the fault goes out, and the process stays up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus_shared.bus.memory import MemoryBroker
from isthmus_testing.ingress import ingress_stack, running_ingress

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
GOOD: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def client(folder: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose server has answered a good request after all the bad ones."""
    async with (
        ingress_stack(folder, "ok", **options) as (ingress, _, _broker),
        httpx.AsyncClient(base_url=f"http://{ingress.address}", timeout=10) as http,
    ):
        yield http
        if "api_keys" not in options.get("settings", {}):
            assert (await http.post(CHAT, json=GOOD)).status_code == 200


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "line 1, column 1"),
    (b"{", "line 1, column 2"),
    (b'{"model": "tiny",\n "messages": [}', "line 2, column 15"),
    (b"[]", "object"),
    (b'{"model": "\xff"}', "UTF-8"),
    (b'{"temperature": NaN}', "NaN"),
    (b'{"temperature": Infinity}', "Infinity"),
    (b'{"a": 1, "a": 2}', "twice"),
    (b'{"prompt": "\\ud800"}', "surrogate"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "number"),
    (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
    (b'{"a": ' + b'{"a": ' * 200 + b"1" + b"}" * 200 + b"}", "nested"),
]


async def test_a_body_that_is_no_proper_json_says_where(folder: Path) -> None:
    async with client(folder) as http:
        for body, words in BAD_BODIES:
            for path in (CHAT, COMPLETIONS):
                error = error_of(await http.post(path, content=body, headers=JSON), 400)
                assert error["type"] == "invalid_request_error"
                assert words in error["message"], body[:64]


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 17}, "n"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"model": 7}, "model"),
    ({"tools": [{}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"best_of": 3}, "best_of"),
    ({"wibble": 1}, "wibble"),
]


async def test_a_field_that_is_wrong_is_named(folder: Path) -> None:
    async with client(folder) as http:
        for change, param in BAD_FIELDS:
            error = error_of(await http.post(CHAT, json={**GOOD, **change}), 400)
            assert error["param"] == param, change
            assert param.split("[")[0] in error["message"]


async def test_fields_without_effect_are_accepted(folder: Path) -> None:
    harmless = {
        "store": True, "metadata": {"a": "b"}, "user": "me", "service_tier": "auto", "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "logit_bias": {}, "best_of": 1, "repetition_penalty": 1.0, "stop": None,
        "parallel_tool_calls": True, "logprobs": None, "max_tokens": None, "top_k": -1,
    }  # fmt: skip
    async with client(folder) as http:
        assert (await http.post(CHAT, json={**GOOD, **harmless})).status_code == 200


async def test_text_parts_are_one_message(folder: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with ingress_stack(folder, "ok") as (ingress, cluster, _), httpx.AsyncClient() as http:
        body = {**GOOD, "messages": [{"role": "user", "content": parts}]}
        assert (await http.post(f"http://{ingress.address}{CHAT}", json=body)).status_code == 200
        assert cluster.workers["p1"].submits[0].token_ids == (256, 260, *b"a\nb", 263, 261)


async def test_ten_megabytes_are_refused_without_being_read(folder: Path) -> None:
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(160):
            sent += 65_536
            yield b"x" * 65_536

    async with client(folder, settings={"max_body_bytes": 65_536}) as http:
        error = error_of(await http.post(CHAT, content=b"x" * 10_000_000, headers=JSON), 413)
        assert error["code"] == "payload_too_large"
        assert "65536" in error["message"]
        error_of(await http.post(CHAT, content=body(), headers=JSON), 413)


async def test_a_body_that_does_not_come_is_given_up(folder: Path) -> None:
    async with ingress_stack(folder, "ok", settings={"body_timeout_s": 0.05}) as (ingress, _, _broker):
        host, port = str(ingress.address).split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{{"
        writer.write(head.encode())
        async with asyncio.timeout(5):
            assert b"408" in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_bytes_that_are_not_http_get_a_json_400(folder: Path) -> None:
    async with ingress_stack(folder, "ok") as (ingress, _, _broker):
        host, port = str(ingress.address).split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        async with asyncio.timeout(5):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
async def test_another_content_type_is_refused_by_name(folder: Path, kind: str) -> None:
    async with client(folder) as http:
        error = error_of(await http.post(CHAT, content=b"{}", headers={"content-type": kind}), 415)
        assert kind in error["message"]
        assert "application/json" in error["message"]


async def test_paths_and_methods_that_do_not_exist(folder: Path) -> None:
    async with client(folder) as http:
        assert error_of(await http.get("/v1/nothing"), 404)["code"] == "not_found"
        assert error_of(await http.post("/v1/embeddings", json={}), 404)["code"] == "not_found"
        response = await http.get(CHAT)
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"] == "POST"
        assert error_of(await http.post("/v1/models"), 405)["code"] == "method_not_allowed"


async def test_keys_are_asked_for_when_there_are_any(folder: Path) -> None:
    async with client(folder, settings={"api_keys": ("k1", "k2")}) as http:
        for path, headers in ((CHAT, {}), (CHAT, {"authorization": "Bearer k3"}), (CHAT, {"authorization": "k1"})):
            error = error_of(await http.post(path, json=GOOD, headers=headers), 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.post(CHAT, json=GOOD, headers={"authorization": "Bearer k2"})).status_code == 200
        assert (await http.get("/health")).status_code == 200


async def test_as_many_choices_as_allowed_and_no_more(folder: Path) -> None:
    async with client(folder, settings={"max_in_flight": 2}) as http:
        assert (await http.post(CHAT, json={**GOOD, "n": 2})).status_code == 200
        response = await http.post(CHAT, json={**GOOD, "n": 3})
        assert error_of(response, 429)["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) >= 1


async def test_without_a_worker_there_is_a_503_that_says_when_to_come_back(folder: Path) -> None:

    bus = MemoryBroker().client()
    async with running_ingress(bus, folder, wait_for_model=False) as ingress, httpx.AsyncClient() as http:
        base = f"http://{ingress.address}"
        response = await http.post(base + CHAT, json=GOOD)
        assert error_of(response, 503)["type"] == "server_error"
        assert response.headers["retry-after"] == "1"
        assert (await http.get(base + "/ready")).status_code == 503
        assert (await http.get(base + "/live")).status_code == 200
        assert (await http.get(base + "/v1/models")).json() == {"object": "list", "data": []}


async def test_a_clients_own_request_id_comes_back_if_it_is_harmless(folder: Path) -> None:
    async with client(folder) as http:
        good = await http.post(CHAT, json=GOOD, headers={"x-request-id": "mine-1"})
        assert good.headers["x-request-id"] == "mine-1"
        assert good.json()["id"] == "chatcmpl-mine-1"
        bad = await http.post(CHAT, json=GOOD, headers={"x-request-id": 'x"}{'})
        assert bad.headers["x-request-id"].startswith("req-")


async def test_tokenize_and_detokenize_are_inverse(folder: Path) -> None:
    async with client(folder) as http:
        answer = (await http.post("/tokenize", json={"model": "tiny", "prompt": "hé"})).json()
        assert answer == {"count": 3, "max_model_len": 4096, "tokens": [104, 195, 169]}
        assert (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": "hé"}
        chat = (await http.post("/tokenize", json=GOOD)).json()
        assert chat["tokens"] == [256, 260, 104, 105, 263, 261]
        assert error_of(await http.post("/detokenize", json={"tokens": ["a"]}), 400)["param"] == "tokens"
