"""The bus against a real server that dies, comes back and misbehaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import nats
import pytest

from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.bus.server import EmbeddedNats
from isthmus_shared.config import ServiceConfig
from isthmus_shared.errors import BusDisconnected, DeadlineExceeded, Fault, IsthmusError, NoResponders
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.service import ServiceRuntime
from isthmus_testing import eventually

WAIT_S = 20.0
pytestmark = pytest.mark.usefixtures("leak_check")


class Echo(WireMessage):
    KIND: ClassVar[str] = "test_echo"
    number: int = 0
    fault: Fault | None = None


async def echo(message: Echo) -> Echo:
    return message


@asynccontextmanager
async def echo_service(url: str) -> AsyncIterator[ServiceRuntime]:
    """A service that echoes on `svc` and beats on `beat`."""
    config = ServiceConfig(nats_url=url, heartbeat_interval_s=0.05)
    listening = asyncio.Event()
    async with ServiceRuntime("echo", config) as runtime, asyncio.TaskGroup() as tasks:
        work = [
            tasks.create_task(
                runtime.serve("svc", Echo, echo, on_error=lambda fault: Echo(fault=fault), listening=listening)
            ),
            tasks.create_task(runtime.heartbeat("beat", lambda: Echo(number=1))),
        ]
        await listening.wait()
        yield runtime
        for task in work:
            task.cancel()


async def test_under_traffic_an_outage_fails_typed_and_everything_heals(nats_server: EmbeddedNats) -> None:
    outcomes: list[str] = []

    async def traffic(bus: NatsBus, stop: asyncio.Event) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                async with asyncio.timeout(WAIT_S):
                    reply = await bus.request("svc", Echo(number=number).encode(), timeout_s=2)
                assert Echo.decode(reply.data).number == number
                outcomes.append("ok")
            except IsthmusError as error:
                outcomes.append(error.code)
                await asyncio.sleep(0)

    async with (
        echo_service(nats_server.url) as service,
        await NatsBus.connect(nats_server.url, name="client") as bus,
        bus.subscribe("beat") as beats,
        asyncio.TaskGroup() as tasks,
    ):
        stop = asyncio.Event()
        for _ in range(8):
            tasks.create_task(traffic(bus, stop))
        for _ in range(2):
            good = outcomes.count("ok")
            await eventually(lambda good=good: outcomes.count("ok") > good + 50)  # type: ignore[misc]
            await nats_server.stop(kill=True)
            await eventually(lambda: not bus.connected and not service.bus.connected)
            bad = outcomes.count("bus_disconnected")
            await eventually(lambda bad=bad: outcomes.count("bus_disconnected") > bad)  # type: ignore[misc]
            assert service.problems()["bus"]
            await nats_server.start()
            good = outcomes.count("ok")
            await eventually(lambda good=good: outcomes.count("ok") > good + 50)  # type: ignore[misc]
        stop.set()
        async with asyncio.timeout(WAIT_S):
            seen = 0
            async for _ in beats:
                seen += 1
                if seen == 5:
                    break
    # no_responders and deadline_exceeded: the client was back before the service, or its request died with the server
    assert set(outcomes) <= {"ok", "bus_disconnected", "no_responders", "deadline_exceeded"}


async def test_a_server_that_is_not_there_is_named(nats_server: EmbeddedNats) -> None:
    url = nats_server.url
    await nats_server.stop()
    with pytest.raises(BusDisconnected, match=url.removeprefix("nats://")):
        await NatsBus.connect(url, name="early", timeout_s=0.3)


async def test_a_password_shows_in_no_error(nats_server: EmbeddedNats) -> None:
    url = nats_server.url
    await nats_server.stop()
    with pytest.raises(BusDisconnected) as caught:
        await NatsBus.connect(url.replace("nats://", "nats://me:hunter2@"), name="early", timeout_s=0.3)
    assert "hunter2" not in caught.value.text


async def test_a_client_that_is_earlier_than_its_server_waits_for_it(nats_server: EmbeddedNats) -> None:
    await nats_server.stop()
    async with asyncio.TaskGroup() as tasks:
        connecting = tasks.create_task(NatsBus.connect(nats_server.url, name="early", timeout_s=WAIT_S))
        await nats_server.start()
        bus = await connecting
        async with bus:
            assert bus.connected
            assert bus.max_payload_bytes == 8 * 1024 * 1024


async def test_after_a_servers_refusal_the_client_is_replaced_and_subscriptions_live() -> None:
    """nats-py closes for good on most -ERR lines; a server that sends one must not silence a process for ever."""
    async with (
        EmbeddedNats() as server,
        refusing_proxy(server) as proxy,
        await NatsBus.connect(proxy.url, name="refused") as bus,
        await NatsBus.connect(server.url, name="other") as other,
        bus.subscribe("s") as subscription,
        other.subscribe("deaf") as deaf,
        asyncio.timeout(WAIT_S),
    ):
        asked = asyncio.create_task(bus.request("deaf", b"", timeout_s=600))
        await anext(aiter(deaf))
        proxy.refuse()
        with pytest.raises(BusDisconnected):
            await asked
        await bus.wait_connected()
        await other.publish("s", b"after")
        assert (await anext(aiter(subscription))).data == b"after"
        with pytest.raises(NoResponders):
            await bus.request("nobody", b"", timeout_s=WAIT_S)


class RefusingProxy:
    def __init__(self, url: str) -> None:
        self.url = url
        self.writers: list[asyncio.StreamWriter] = []

    def refuse(self) -> None:
        """As a server that was given a lower connection limit by a reload."""
        for writer in self.writers:
            writer.write(b"-ERR 'maximum connections exceeded'\r\n")
        self.writers.clear()


@asynccontextmanager
async def refusing_proxy(server: EmbeddedNats) -> AsyncIterator[RefusingProxy]:
    proxy = RefusingProxy("")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        proxy.writers.append(writer)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    proxy.url = f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        listener.close()
        await listener.wait_closed()


async def test_nats_own_client_finds_the_service_and_its_statistics(nats_server: EmbeddedNats) -> None:
    async with echo_service(nats_server.url) as service, await nats.connect(nats_server.url) as tool:
        for number in range(3):
            reply = await tool.request("svc", Echo(number=number).encode(), timeout=WAIT_S)
            assert Echo.decode(reply.data).number == number
        await tool.request("svc", b"junk", timeout=WAIT_S)
        for subject in ("$SRV.STATS", "$SRV.STATS.isthmus-echo", f"$SRV.STATS.isthmus-echo.{service.incarnation}"):
            stats = json.loads((await tool.request(subject, b"", timeout=WAIT_S)).data)
            assert stats["type"] == "io.nats.micro.v1.stats_response"
            (endpoint,) = stats["endpoints"]
            assert (endpoint["name"], endpoint["num_requests"], endpoint["num_errors"]) == ("test_echo", 4, 1)
            assert endpoint["last_error"].startswith("protocol_violation")
        with pytest.raises(nats.errors.NoRespondersError):
            await tool.request("$SRV.PING.isthmus-other", b"", timeout=WAIT_S)


async def test_a_publish_that_waits_for_a_full_socket_can_be_cancelled(nats_server: EmbeddedNats) -> None:
    assert nats_server.pid is not None
    async with await NatsBus.connect(nats_server.url, name="flood") as bus:
        in_publish = False

        async def flood() -> None:
            nonlocal in_publish
            while True:
                in_publish = True
                await bus.publish("flood", bytes(1_000_000))
                in_publish = False
                await asyncio.sleep(0)

        os.kill(nats_server.pid, signal.SIGSTOP)
        try:
            task = asyncio.create_task(flood())
            for _ in range(2000):  # the loop turns, the socket fills, then publish waits and stays waiting
                await asyncio.sleep(0)
            assert in_publish
            task.cancel()
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(asyncio.CancelledError):
                    await task
        finally:
            os.kill(nats_server.pid, signal.SIGCONT)
        with pytest.raises(NoResponders):
            await bus.request("nobody", b"", timeout_s=WAIT_S)


async def test_the_server_ends_with_its_context_and_can_come_back_on_its_port() -> None:
    async with EmbeddedNats() as server:
        first = server.url
        await server.restart()
        assert server.url == first
        async with await NatsBus.connect(server.url, name="x") as bus, bus.subscribe("deaf"):
            with pytest.raises(DeadlineExceeded):
                await bus.request("deaf", b"", timeout_s=0.01)
    with pytest.raises(BusDisconnected):
        await NatsBus.connect(first, name="late", timeout_s=0.2)
