"""Workers die, refuse, stall and lose messages; clients leave and stop reading. Nobody is left holding anything."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus_ingress.service import Ingress
from isthmus_shared.bus.memory import MemoryBroker, MemoryBus
from isthmus_shared.errors import NoCapacity
from isthmus_shared.messages.route import Deadlines
from isthmus_testing.fake_cluster import FakeCluster, say
from isthmus_testing.ingress import ingress_stack, running_ingress
from isthmus_testing.waiting import eventually

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = "the whole answer"
CANCEL_WITHIN_S = 1.0
"""A hundredth of it on a quiet machine; what it must tell apart is waiting for a lease, which takes tens of seconds."""


async def ask(ingress: Ingress, **change: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20) as http:
        return await http.post(f"http://{ingress.address}{CHAT}", json={**BODY, **change})


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


NAMES = ("p1", "p2", "d1", "d2")


@pytest.mark.parametrize(
    ("who", "fault", "value"),
    [
        ("d1", "die_after", 0),
        ("d1", "die_after", 3),
        ("p1", "die_after", 0),
        ("d1", "fail_after", 3),
        ("p1", "fail_after", 0),
        ("d1", "lose_token", 4),
        ("d1", "duplicate", True),
        ("p1", "duplicate", True),
        ("p1", "refuse", NoCapacity("full")),
        ("d1", "refuse", NoCapacity("full")),
    ],
)
async def test_the_client_sees_nothing_of_a_fault(folder: Path, who: str, fault: str, value: Any) -> None:
    async with ingress_stack(folder, TEXT, names=NAMES) as (ingress, cluster, _):
        setattr(cluster.workers[who].faults, fault, value)
        assert text_of(await ask(ingress, seed=1)) == TEXT
        await eventually(lambda: not cluster.held)


async def test_a_stall_is_replanned_within_stall_s(folder: Path) -> None:
    limits = Deadlines(ttft_s=5, transfer_s=0.1, stall_s=0.1)
    async with ingress_stack(folder, TEXT, names=NAMES, deadlines=limits) as (ingress, cluster, _):
        cluster.workers["d1"].faults.stall_after = 2
        assert text_of(await ask(ingress)) == TEXT
        assert [cancel.reason for cancel in cluster.workers["d1"].cancels] == ["replanned"]
        assert cluster.routes[1].exclude == (cluster.workers["d1"].incarnation,)


async def test_a_worker_that_falls_silent_is_left_within_its_beats(folder: Path) -> None:
    async with ingress_stack(folder, TEXT, names=NAMES, beat_s=0.25) as (ingress, cluster, _):
        cluster.workers["d1"].faults.stall_after = 2
        asking = asyncio.ensure_future(ask(ingress))
        await eventually(lambda: len(cluster.workers["d1"].submits) == 1)
        await cluster.workers["d1"].die(tell=False)
        async with asyncio.timeout(5):
            assert text_of(await asking) == TEXT


async def test_when_all_attempts_fail_the_last_error_is_a_status(folder: Path) -> None:
    stack = ingress_stack(folder, TEXT, names=("p1", "d1", "a1"), settings={"route_patience_s": 0})
    async with stack as (ingress, cluster, _):
        for worker in cluster.workers.values():
            worker.faults.refuse = NoCapacity("full", retry_after_s=7)
        response = await ask(ingress, stream=True)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "no_capacity"
        assert response.headers["retry-after"] in ("2", "7")
        await eventually(lambda: not ingress.runtime.metrics.requests_in_flight._value.get())
        page = ingress.runtime.metrics.exposition().decode()
        assert 'isthmus_requests_total{endpoint="chat",outcome="no_capacity"} 1.0' in page
        assert 'isthmus_request_success_total{finished_reason="error"} 1.0' in page


async def test_the_only_decode_worker_may_die_and_be_started_again(folder: Path) -> None:
    async with (
        ingress_stack(folder, TEXT, settings={"attempts": 2}) as (ingress, cluster, _),
        asyncio.TaskGroup() as new,
    ):
        cluster.workers["d1"].faults.die_after = 3
        asking = asyncio.ensure_future(ask(ingress))
        await eventually(lambda: len(cluster.routes) >= 4, what="patience: more questions than attempts")
        assert not asking.done()
        again = await cluster.add_worker(new, "d1")
        assert text_of(await asking) == TEXT
        again.cancel()


async def test_without_a_planner_a_new_request_is_told_soon_to_come_back(folder: Path) -> None:
    broker = MemoryBroker()
    fake = FakeCluster(broker.client("cluster"))
    async with fake.running(planner=False), running_ingress(broker.client("ingress"), folder) as ingress:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        response = await ask(ingress)
        assert loop.time() - asked_s < 3
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "no_responders"


async def leave(ingress: Ingress, cluster: FakeCluster, body: dict[str, Any], *, after: bytes | None) -> float:
    """Ask, hang up once `after` was read (None: once a worker has the request); seconds until all was cancelled."""
    host, port = str(ingress.address).split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    if after is not None:
        async with asyncio.timeout(5):
            await reader.readuntil(after)
    else:
        await eventually(lambda: any(worker.submits for worker in cluster.workers.values()))
    loop = asyncio.get_running_loop()
    left_s = loop.time()
    writer.close()
    await writer.wait_closed()
    await eventually(lambda: not cluster.held and any(worker.cancels for worker in cluster.workers.values()))
    return loop.time() - left_s


async def test_a_client_that_leaves_a_stream_is_cancelled_at_once(folder: Path) -> None:
    async with ingress_stack(folder, "", tokens=say("x", eos=None), step_s=0.005) as (ingress, cluster, _):
        assert await leave(ingress, cluster, {**BODY, "stream": True}, after=b'"x"') < CANCEL_WITHIN_S
        assert [cancel.reason for cancel in cluster.workers["d1"].cancels] == ["client_gone"]


async def test_a_client_that_leaves_before_the_first_token_is_cancelled_at_once(folder: Path) -> None:
    for stream in (True, False):
        async with ingress_stack(folder, TEXT) as (ingress, cluster, _):
            cluster.gate.clear()
            await_ticket = {**BODY, "stream": stream}
            assert await leave(ingress, cluster, await_ticket, after=None) < CANCEL_WITHIN_S
            reached = {name for name, worker in cluster.workers.items() if worker.submits}
            assert {name for name, worker in cluster.workers.items() if worker.cancels} == reached


async def test_a_worker_that_accepts_after_the_client_left_is_cancelled_then(folder: Path) -> None:
    async with ingress_stack(folder, TEXT) as (ingress, cluster, _):
        worker = cluster.workers["p1"]
        worker.faults.answer_late = asyncio.Event()
        cluster.gate.clear()
        await leave(ingress, cluster, BODY, after=None)
        assert len(worker.cancels) == 1
        worker.faults.answer_late.set()
        await eventually(lambda: len(worker.cancels) == 2)


async def test_a_client_that_stops_reading_is_cut_off(folder: Path) -> None:
    settings = {"write_stall_s": 0.2}
    script = say("x" * 64, eos=None)
    async with ingress_stack(folder, "", tokens=script, settings=settings, max_model_len_tokens=1_000_000) as (
        ingress,
        cluster,
        _,
    ):
        host, port = str(ingress.address).split(":")
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(plain, (host, int(port)))
            data = json.dumps({**BODY, "stream": True, "logprobs": True, "top_logprobs": 2}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            await loop.sock_sendall(plain, f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            await eventually(lambda: bool(cluster.workers["d1"].cancels), timeout_s=30)
        await eventually(lambda: not cluster.held)
        assert ingress.server is not None
        server = ingress.server
        await eventually(lambda: not server.connections, what="the connection is dropped")


async def test_small_writes_leave_at_once(folder: Path) -> None:
    async with ingress_stack(folder, TEXT) as (ingress, _, _broker), httpx.AsyncClient() as http:
        await http.get(f"http://{ingress.address}/live")
        assert ingress.server is not None
        (connection,) = ingress.server.connections
        inner = connection.transport.get_extra_info("socket")
        assert inner.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_what_has_begun_ends_before_the_ingress_does(folder: Path) -> None:
    async with ingress_stack(folder, TEXT) as (ingress, cluster, _):
        cluster.gate.clear()
        asking = asyncio.ensure_future(ask(ingress))
        await eventually(lambda: bool(cluster.held))
        ingress.runtime.stopping.set()
        await eventually(lambda: ingress.runtime.state.value == "draining")
        cluster.gate.set()
        assert text_of(await asking) == TEXT


@pytest.mark.parametrize("first", [True, False])
async def test_what_was_said_during_an_outage_is_found_missing_soon_after(folder: Path, first: bool) -> None:
    """The first token, or the last ones. The deadlines of the route are 10 s; the answer is there long before."""
    async with ingress_stack(folder, TEXT, step_s=0.02) as (ingress, cluster, _):
        bus = ingress.runtime.bus
        assert isinstance(bus, MemoryBus)
        if first:
            cluster.gate.clear()
        asking = asyncio.ensure_future(ask(ingress))
        await eventually(lambda: "d1" in cluster.held if first else cluster.workers["d1"].said > 1)
        bus.disconnect()
        cluster.gate.set()
        await eventually(lambda: cluster.workers["p1"].said > 0 if first else not cluster.workers["d1"].held)
        bus.reconnect()
        async with asyncio.timeout(5):
            assert text_of(await asking) == TEXT


async def test_a_cancel_outlives_an_outage_of_the_bus(folder: Path) -> None:
    async with ingress_stack(folder, "", tokens=say("x", eos=None), step_s=0.01) as (ingress, cluster, _):
        bus = ingress.runtime.bus
        assert isinstance(bus, MemoryBus)
        asking = asyncio.ensure_future(ask(ingress))
        await eventually(lambda: "d1" in cluster.held)
        bus.disconnect()
        asking.cancel()
        await eventually(lambda: not ingress.hub.running, what="the client has left")
        assert not cluster.workers["d1"].cancels
        bus.reconnect()
        await eventually(lambda: not cluster.held, timeout_s=2)
        assert [cancel.reason for cancel in cluster.workers["d1"].cancels] == ["client_gone"]


async def test_a_cancel_waits_for_a_worker_that_comes_back_to_the_bus_later(folder: Path) -> None:
    broker = MemoryBroker()
    workers = broker.client("cluster")
    fake = FakeCluster(workers, script=say("x", eos=None), step_s=0.01)
    async with fake.running(), running_ingress(broker.client("ingress"), folder) as ingress:
        asking = asyncio.ensure_future(ask(ingress))
        await eventually(lambda: "d1" in fake.held)
        workers.disconnect()
        asking.cancel()
        await eventually(lambda: not ingress.hub.running, what="the client has left")
        workers.reconnect()
        await eventually(lambda: not fake.held, timeout_s=2)


async def test_an_ingress_that_ends_waits_for_no_bus(folder: Path) -> None:
    async with asyncio.timeout(5):
        async with ingress_stack(folder, "", tokens=say("x", eos=None), step_s=0.01) as (ingress, cluster, _):
            bus = ingress.runtime.bus
            assert isinstance(bus, MemoryBus)
            asking = asyncio.ensure_future(ask(ingress))
            await eventually(lambda: "d1" in cluster.held)
            bus.disconnect()
            asking.cancel()
            await eventually(lambda: not ingress.hub.running)
            for worker in cluster.workers.values():
                await worker.die(tell=False)  # what they hold ends with their leases


async def test_the_bus_out_of_reach_is_a_503(folder: Path) -> None:
    async with ingress_stack(folder, TEXT) as (ingress, _, broker):
        broker.disconnect()
        response = await ask(ingress)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "bus_disconnected"
        broker.reconnect()
        assert text_of(await ask(ingress)) == TEXT
