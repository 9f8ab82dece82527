"""The same API over request/reply, in JSON and msgpack."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from isthmus_shared.bus.port import Bus, BusMessage
from isthmus_shared.messages import subjects
from isthmus_testing.fake_cluster import say
from isthmus_testing.ingress import ingress_stack
from isthmus_testing.waiting import eventually

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
FORMATS = [
    pytest.param(json.dumps, json.loads, "application/json", id="json"),
    pytest.param(msgpack.packb, msgpack.unpackb, "application/msgpack", id="msgpack"),
]


def packed(pack: Any, body: dict[str, Any]) -> bytes:
    data = pack(body)
    return data if isinstance(data, bytes) else data.encode()


async def stream_of(bus: Bus, subject: str, data: bytes, headers: dict[str, str]) -> list[BusMessage]:
    inbox = bus.new_inbox()
    found: list[BusMessage] = []
    async with asyncio.timeout(60), bus.subscribe(inbox) as replies:
        await bus.publish(subject, data, reply=inbox, headers=headers)
        async for message in replies:
            found.append(message)
            if message.headers.get("isthmus-end") == "true":
                break
    return found


@pytest.mark.parametrize(("pack", "unpack", "kind"), FORMATS)
async def test_an_answer_comes_in_the_requests_format(folder: Path, pack: Any, unpack: Any, kind: str) -> None:
    async with ingress_stack(folder, "hello", serve_http=False) as (_, _cluster, broker):
        bus = broker.client()
        headers = {"content-type": kind}
        answer = await bus.request(subjects.API_CHAT, packed(pack, CHAT), timeout_s=5, headers=headers)
        assert answer.headers["content-type"] == kind
        assert unpack(answer.data)["choices"][0]["message"]["content"] == "hello"
        body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 2}
        answer = await bus.request(subjects.API_COMPLETIONS, packed(pack, body), timeout_s=5, headers=headers)
        assert unpack(answer.data)["choices"][0]["text"] == "he"
        answer = await bus.request(subjects.API_MODELS, b"", timeout_s=5, headers=headers)
        assert [model["id"] for model in unpack(answer.data)["data"]] == ["tiny"]


@pytest.mark.parametrize(("pack", "unpack", "kind"), FORMATS)
async def test_a_stream_is_counted_and_its_end_is_marked(folder: Path, pack: Any, unpack: Any, kind: str) -> None:
    async with ingress_stack(folder, "a\n\nb", serve_http=False) as (_, _cluster, broker):
        body = packed(pack, {**CHAT, "stream": True, "stream_options": {"include_usage": True}})
        messages = await stream_of(broker.client(), subjects.API_CHAT, body, {"content-type": kind})
        assert [message.headers["isthmus-seq"] for message in messages] == [str(i) for i in range(len(messages))]
        assert ["isthmus-end" in message.headers for message in messages] == [False] * (len(messages) - 1) + [True]
        chunks = [chunk for message in messages for chunk in unpack(message.data)]
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
        assert text == "a\n\nb"
        assert chunks[-1]["usage"]["completion_tokens"] == 5


async def test_errors_have_openais_shape_and_a_status(folder: Path) -> None:
    async with ingress_stack(folder, "x", serve_http=False) as (_, _cluster, broker):
        bus = broker.client()
        for body, status, param in (
            (b"{", "400", "body"),
            (json.dumps({**CHAT, "max_tokens": -1}).encode(), "400", "max_tokens"),
            (json.dumps({**CHAT, "model": "gpt"}).encode(), "404", "model"),
        ):
            answer = await bus.request(subjects.API_CHAT, body, timeout_s=5)
            assert answer.headers["isthmus-status"] == status
            assert json.loads(answer.data)["error"]["param"] == param
        answer = await bus.request(
            subjects.API_CHAT, b"\xc1", timeout_s=5, headers={"content-type": "application/msgpack"}
        )
        error = msgpack.unpackb(answer.data)["error"]
        assert "msgpack" in error["message"]
        assert error["param"] == "body"


async def test_an_error_in_a_stream_is_its_last_message(folder: Path) -> None:
    async with ingress_stack(folder, "abc", serve_http=False, settings={"attempts": 1}) as (_, cluster, broker):
        cluster.workers["d1"].faults.fail_after = 1
        body = json.dumps({**CHAT, "stream": True}).encode()
        messages = await stream_of(broker.client(), subjects.API_CHAT, body, {})
        assert json.loads(messages[-1].data)["error"]["code"] == "engine_failed"
        assert messages[-1].headers["isthmus-status"] == "500"


async def test_the_door_is_a_nats_service_with_statistics(folder: Path) -> None:
    async with ingress_stack(folder, "ok", serve_http=False) as (_, _cluster, broker):
        bus = broker.client()
        await bus.request(subjects.API_CHAT, json.dumps(CHAT).encode(), timeout_s=5)
        await bus.request(subjects.API_CHAT, b"{", timeout_s=5)
        info = json.loads((await bus.request("$SRV.INFO.isthmus-ingress", b"", timeout_s=5)).data)
        assert {endpoint["subject"]: endpoint["queue_group"] for endpoint in info["endpoints"]} == dict.fromkeys(
            (subjects.API_CHAT, subjects.API_COMPLETIONS, subjects.API_MODELS), subjects.API_QUEUE
        )

        async def stats() -> dict[str, Any]:
            answer = json.loads((await bus.request("$SRV.STATS.isthmus-ingress", b"", timeout_s=5)).data)
            found: dict[str, Any] = next(e for e in answer["endpoints"] if e["name"] == "chat")
            return found

        chat = await stats()
        assert (chat["num_requests"], chat["num_errors"]) == (2, 1)
        assert chat["last_error"].startswith("invalid_request")
        assert chat["processing_time"] > 0


async def test_a_caller_may_cancel(folder: Path) -> None:
    script = say("x", eos=None)
    async with ingress_stack(folder, "", tokens=script, step_s=0.002, serve_http=False) as (_, cluster, broker):
        bus = broker.client()
        inbox, stop = bus.new_inbox(), subjects.api_cancel("acme", "7")
        async with bus.subscribe(inbox) as replies:
            body = json.dumps({**CHAT, "stream": True}).encode()
            await bus.publish(subjects.API_CHAT, body, reply=inbox, headers={"isthmus-cancel": stop})
            async with asyncio.timeout(5):
                await anext(aiter(replies))
            await bus.publish(stop, b"")
            await eventually(lambda: bool(cluster.workers["d1"].cancels) and not cluster.held)
