"""ServiceRuntime over the in-memory bus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.config import ServiceConfig
from isthmus_shared.errors import ConfigInvalid, Fault, NoCapacity
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.health import ProcessState
from isthmus_shared.service import ServiceRuntime
from isthmus_testing import eventually

WAIT_S = 10.0
pytestmark = pytest.mark.usefixtures("leak_check")


class Ask(WireMessage):
    KIND: ClassVar[str] = "test_ask"
    text: str


class Answer(WireMessage):
    KIND: ClassVar[str] = "test_answer"
    text: str = ""
    fault: Fault | None = None


@pytest.fixture
async def runtime(memory_broker: MemoryBroker) -> AsyncIterator[ServiceRuntime]:
    config = ServiceConfig(heartbeat_interval_s=60)
    async with ServiceRuntime("tested", config, bus=memory_broker.client("tested"), instance="t1") as runtime:
        yield runtime


def refusal(fault: Fault) -> Answer:
    return Answer(fault=fault)


async def answer(ask: Ask) -> Answer:
    match ask.text:
        case "full":
            raise NoCapacity("no room", retry_after_s=2)
        case "bug":
            raise ZeroDivisionError("a bug")
        case "huge":
            return Answer(text="x" * 9_000_000)
    return Answer(text=ask.text.upper())


async def get(address: str | None, path: str, *, raw: bytes | None = None) -> tuple[int, bytes]:
    assert address is not None
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(raw if raw is not None else f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        async with asyncio.timeout(WAIT_S):
            response = await reader.read()
    finally:
        writer.close()
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


async def ask_all(runtime: ServiceRuntime, broker: MemoryBroker, payloads: list[bytes]) -> list[Answer]:
    client, listening = broker.client(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(
            runtime.serve("svc", Ask, answer, on_error=refusal, queue="g", name="ask", listening=listening)
        )
        await listening.wait()
        answers = [Answer.decode((await client.request("svc", data, timeout_s=WAIT_S)).data) for data in payloads]
        serving.cancel()
    await client.close()
    return answers


async def test_what_a_handler_raises_is_answered_and_the_service_goes_on(
    runtime: ServiceRuntime, memory_broker: MemoryBroker
) -> None:
    texts = ["full", "bug", "huge", "fine"]
    full, bug, huge, fine = await ask_all(runtime, memory_broker, [Ask(text=text).encode() for text in texts])
    assert full.fault == NoCapacity("no room", retry_after_s=2).to_fault()
    assert bug.fault is not None
    assert (bug.fault.code, bug.fault.why) == ("internal_error", "ZeroDivisionError: a bug")
    assert huge.fault is not None
    assert huge.fault.code == "payload_too_large"
    assert (fine.text, fine.fault) == ("FINE", None)


def answer_short(ask: Ask) -> Answer | None:
    """At once, unless it begins with "slow"."""
    match ask.text:
        case "full":
            raise NoCapacity("no room", retry_after_s=2)
        case "bug":
            raise ZeroDivisionError("a bug")
        case "huge":
            return Answer(text="x" * 9_000_000)
    return None if ask.text.startswith("slow") else Answer(text=f"at once: {ask.text}")


async def test_what_needs_no_waiting_is_answered_at_once_and_everything_else_as_ever(
    runtime: ServiceRuntime, memory_broker: MemoryBroker
) -> None:
    client, listening = memory_broker.client(), asyncio.Event()
    payloads = [*(Ask(text=text).encode() for text in ("a", "slow one", "full", "bug", "huge")), b"\xff"]
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(
            runtime.serve("svc", Ask, answer, on_error=refusal, name="quick", listening=listening, at_once=answer_short)
        )
        await listening.wait()
        many = [tasks.create_task(client.request("svc", data, timeout_s=WAIT_S)) for data in payloads * 3]
        async with asyncio.timeout(WAIT_S):
            answers = [Answer.decode((await each).data) for each in many]
        serving.cancel()
    await client.close()
    assert [a.fault.code if a.fault else a.text for a in answers] == 3 * [
        "at once: a",
        "SLOW ONE",
        "no_capacity",
        "internal_error",
        "payload_too_large",
        "protocol_violation",
    ]
    count = runtime.metrics.registry.get_sample_value
    outcomes = {
        "ok": 6.0,
        "no_capacity": 3.0,
        "internal_error": 3.0,
        "payload_too_large": 3.0,
        "protocol_violation": 3.0,
    }
    for outcome, times in outcomes.items():
        assert count("isthmus_bus_calls_total", {"endpoint": "quick", "outcome": outcome}) == times


async def test_requests_that_are_answered_at_once_let_others_run(
    runtime: ServiceRuntime, memory_broker: MemoryBroker
) -> None:
    client, listening = memory_broker.client(), asyncio.Event()
    served, seen = 0, []

    def count(_: Ask) -> Answer:
        nonlocal served
        served += 1
        return Answer()

    async def other() -> None:
        while served < 200:
            seen.append(served)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(
            runtime.serve("svc", Ask, answer, on_error=refusal, listening=listening, at_once=count)
        )
        await listening.wait()
        for _ in range(200):
            await client.publish("svc", Ask(text="a").encode())
        async with asyncio.timeout(WAIT_S):
            await other()
        serving.cancel()
    await client.close()
    assert len(set(seen)) >= 4, "not all of them in one go"


async def test_an_answer_goes_to_an_inbox_only(runtime: ServiceRuntime, memory_broker: MemoryBroker) -> None:
    """Whoever asks may name where the answer goes: a command's subject would make us say what the asker may not."""
    client, listening = memory_broker.client(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks, client.subscribe("isthmus.v1.>") as said:
        serving = tasks.create_task(runtime.serve("svc", Ask, answer, on_error=refusal, listening=listening))
        await listening.wait()
        for reply in ("isthmus.v1.worker.w1.cancel", "_INBOXES.x", "_INBOX"):
            await client.publish("svc", Ask(text="a").encode(), reply=reply)
        await client.request("svc", Ask(text="b").encode(), timeout_s=WAIT_S)
        await client.publish("isthmus.v1.end", b"")
        assert (await anext(aiter(said))).subject == "isthmus.v1.end"
        serving.cancel()
    await client.close()


async def test_a_malformed_request_is_answered_as_protocol_violation(
    runtime: ServiceRuntime, memory_broker: MemoryBroker
) -> None:
    answers = await ask_all(runtime, memory_broker, [b"", b"\xff\xff", Answer().encode(), Ask(text="a").encode()])
    assert [a.fault.code if a.fault else a.text for a in answers] == ["protocol_violation"] * 3 + ["A"]
    assert runtime.metrics.registry.get_sample_value("isthmus_bus_malformed_total", {"endpoint": "ask"}) == 3


async def test_nats_tools_see_requests_errors_and_times(runtime: ServiceRuntime, memory_broker: MemoryBroker) -> None:
    await ask_all(runtime, memory_broker, [Ask(text="before").encode()])
    client, listening = memory_broker.client(), asyncio.Event()

    async def asked(verb: str, suffix: str = "") -> dict[str, Any]:
        answer = json.loads((await client.request(f"$SRV.{verb}{suffix}", b"", timeout_s=WAIT_S)).data)
        assert answer["type"] == f"io.nats.micro.v1.{verb.lower()}_response"
        assert (answer["name"], answer["id"]) == ("isthmus-tested", runtime.incarnation)
        return dict(answer)

    assert (await asked("INFO"))["endpoints"] == []  # nobody serves it now
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(
            runtime.serve("svc", Ask, answer, on_error=refusal, queue="g", name="ask", listening=listening)
        )
        await listening.wait()
        for text in ("a", "full", "b"):
            await client.request("svc", Ask(text=text).encode(), timeout_s=WAIT_S)
        for suffix in ("", ".isthmus-tested", f".isthmus-tested.{runtime.incarnation}"):
            await asked("PING", suffix)
            (info,) = (await asked("INFO", suffix))["endpoints"]
            assert (info["name"], info["subject"], info["queue_group"]) == ("ask", "svc", "g")
            (stats,) = (await asked("STATS", suffix))["endpoints"]
            assert (stats["num_requests"], stats["num_errors"]) == (4, 1)
            assert stats["last_error"] == "no_capacity: no room"
            assert stats["processing_time"] // 4 == stats["average_processing_time"] > 0
        serving.cancel()


async def test_handlers_run_concurrently_up_to_the_bound(runtime: ServiceRuntime, memory_broker: MemoryBroker) -> None:
    running, most, release, listening = 0, 0, asyncio.Event(), asyncio.Event()

    async def slow(ask: Ask) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await release.wait()
        running -= 1
        return Answer()

    client = memory_broker.client()
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(
            runtime.serve("svc", Ask, slow, on_error=refusal, concurrency=3, listening=listening)
        )
        await listening.wait()
        asked = [tasks.create_task(client.request("svc", Ask(text="").encode(), timeout_s=WAIT_S)) for _ in range(9)]
        await eventually(lambda: running == 3)
        release.set()
        await asyncio.wait(asked)
        serving.cancel()
    assert most == 3


async def test_a_heartbeat_comes_at_once_on_change_and_after_an_outage(
    runtime: ServiceRuntime, memory_broker: MemoryBroker
) -> None:
    beats: list[str] = []

    async def take(beat: Ask) -> None:
        beats.append(beat.text)

    listening = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(runtime.watch("beat", Ask, take, listening=listening))
        await listening.wait()
        beating = tasks.create_task(runtime.heartbeat("beat", lambda: Ask(text=runtime.state.value)))
        await eventually(lambda: beats == ["starting"])
        runtime.set_state(ProcessState.READY)
        await eventually(lambda: beats == ["starting", "ready"])
        memory_broker.disconnect()
        runtime.set_state(ProcessState.DRAINING)
        assert (await get(runtime.http_address, "/live"))[0] == 200  # the loop has turned; nothing was published
        assert len(beats) == 2
        memory_broker.reconnect()
        await eventually(lambda: beats == ["starting", "ready", "draining"])
        watching.cancel()
        beating.cancel()


async def test_a_bus_that_is_back_with_a_limit_below_a_heartbeat_does_not_end_the_process(
    runtime: ServiceRuntime, memory_broker: MemoryBroker
) -> None:
    beats: list[str] = []

    async def take(beat: Ask) -> None:
        beats.append(beat.text)

    listening, limit = asyncio.Event(), memory_broker.max_payload_bytes
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(runtime.watch("beat", Ask, take, listening=listening))
        await listening.wait()
        memory_broker.max_payload_bytes = 1
        beating = tasks.create_task(runtime.heartbeat("beat", lambda: Ask(text=runtime.state.value)))
        assert (await get(runtime.http_address, "/live"))[0] == 200  # the loop has turned; the first was refused
        assert not beats
        memory_broker.max_payload_bytes = limit
        runtime.set_state(ProcessState.READY)
        await eventually(lambda: beats == ["ready"])
        watching.cancel()
        beating.cancel()


async def test_a_watch_survives_malformed_and_refused_messages(
    runtime: ServiceRuntime, memory_broker: MemoryBroker
) -> None:
    seen: list[str] = []

    async def take(message: Ask) -> None:
        if message.text == "refuse":
            raise NoCapacity("not this one")
        seen.append(message.text)

    client, listening = memory_broker.client(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(runtime.watch("w", Ask, take, name="w", listening=listening))
        await listening.wait()
        for data in (b"junk", Ask(text="refuse").encode(), Ask(text="good").encode()):
            await client.publish("w", data)
        await eventually(lambda: seen == ["good"])
        watching.cancel()
    assert runtime.metrics.registry.get_sample_value("isthmus_bus_malformed_total", {"endpoint": "w"}) == 2


async def test_serving_starts_once_the_bus_is_back(runtime: ServiceRuntime, memory_broker: MemoryBroker) -> None:
    memory_broker.disconnect()
    client, listening = memory_broker.client(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(runtime.serve("svc", Ask, answer, on_error=refusal, listening=listening))
        assert (await get(runtime.http_address, "/live"))[0] == 200
        assert not listening.is_set()
        memory_broker.reconnect()
        async with asyncio.timeout(WAIT_S):
            await listening.wait()
        reply = await client.request("svc", Ask(text="a").encode(), timeout_s=WAIT_S)
        assert Answer.decode(reply.data).text == "A"
        serving.cancel()


async def ready(runtime: ServiceRuntime) -> tuple[int, dict[str, Any]]:
    status, body = await get(runtime.http_address, "/ready")
    return status, json.loads(body)["problems"]


async def test_ready_says_why_not(runtime: ServiceRuntime, memory_broker: MemoryBroker) -> None:
    assert await ready(runtime) == (503, {"state": "starting"})
    runtime.set_state(ProcessState.READY)
    assert await ready(runtime) == (200, {})
    memory_broker.disconnect()
    assert await ready(runtime) == (503, {"bus": "the bus is out of reach"})
    memory_broker.reconnect()
    trouble: list[str | None] = ["no relay"]
    runtime.add_readiness("relay", lambda: trouble[0])
    assert await ready(runtime) == (503, {"relay": "no relay"})
    trouble[0] = None
    assert await ready(runtime) == (200, {})
    runtime.set_state(ProcessState.DRAINING)
    assert await ready(runtime) == (503, {"state": "draining"})


async def test_health_live_and_metrics_answer_in_every_state(
    runtime: ServiceRuntime, memory_broker: MemoryBroker
) -> None:
    memory_broker.disconnect()
    status, body = await get(runtime.http_address, "/health")
    health = json.loads(body)
    assert (status, health["instance"], health["bus_connected"]) == (200, "t1", False)
    assert health["incarnation"] == runtime.incarnation
    assert (await get(runtime.http_address, "/live"))[0] == 200
    status, text = await get(runtime.http_address, "/metrics")
    assert status == 200
    assert b"isthmus_bus_connected 0.0" in text
    assert b'isthmus_process_state{state="starting"} 1.0' in text


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /nowhere HTTP/1.1\r\n\r\n", 404),
        (b"POST /live HTTP/1.1\r\n\r\n", 405),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 400),
        (b"GET /live?probe=1 HTTP/1.0\r\n\r\n", 200),
    ],
)
async def test_a_bad_http_request_gets_a_status(runtime: ServiceRuntime, raw: bytes, status: int) -> None:
    assert (await get(runtime.http_address, "", raw=raw))[0] == status
    assert (await get(runtime.http_address, "/live"))[0] == 200


async def test_head_has_no_body(runtime: ServiceRuntime) -> None:
    assert await get(runtime.http_address, "", raw=b"HEAD /live HTTP/1.1\r\n\r\n") == (200, b"")


async def test_a_taken_port_names_the_setting(runtime: ServiceRuntime, memory_broker: MemoryBroker) -> None:
    assert runtime.http_address is not None
    config = ServiceConfig(http_port=int(runtime.http_address.rpartition(":")[2]))
    with pytest.raises(ConfigInvalid, match="ISTHMUS_HTTP_PORT"):
        async with ServiceRuntime("second", config, bus=memory_broker.client()):
            pass


async def test_nothing_stays_subscribed_after_the_end(memory_broker: MemoryBroker) -> None:
    async with ServiceRuntime("brief", ServiceConfig(), bus=memory_broker.client()):
        await eventually(lambda: len(memory_broker.subscriptions) == 9)
    assert memory_broker.subscriptions == ()
