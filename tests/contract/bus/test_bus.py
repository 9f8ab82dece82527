"""What both buses promise (`isthmus_shared.bus.port`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.bus.port import Bus, BusMessage, Subscription
from isthmus_shared.errors import BusDisconnected, DeadlineExceeded, InvalidRequest, NoResponders, PayloadTooLarge
from isthmus_testing import eventually

from .conftest import MAX_PAYLOAD_BYTES, Net

WAIT_S = 10.0


async def take(subscription: Subscription, count: int) -> list[BusMessage]:
    taken: list[BusMessage] = []
    async with asyncio.timeout(WAIT_S):
        async for message in subscription:
            taken.append(message)
            if len(taken) == count:
                break
    return taken


@asynccontextmanager
async def echo(bus: Bus, subject: str, *, queue: str | None = None, tag: bytes = b"") -> AsyncIterator[None]:
    async def answer(subscription: Subscription) -> None:
        async for message in subscription:
            assert message.reply is not None
            await bus.publish(message.reply, tag + message.data, headers=message.headers)

    async with bus.subscribe(subject, queue=queue) as subscription, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(answer(subscription))
        yield
        task.cancel()


async def test_order_is_kept_per_publisher_and_subject(net: Net) -> None:
    one, two = await net.client("one"), await net.client("two")
    async with two.subscribe("a.b") as subscription:
        for number in range(500):
            headers = {"X-Odd": "1"} if number % 7 % 2 else None
            await one.publish("a.b", str(number).encode(), headers=headers)
        assert [int(m.data) for m in await take(subscription, 500)] == list(range(500))


async def test_what_waits_may_be_taken_at_once(net: Net) -> None:
    bus = await net.client("one")
    async with bus.subscribe("a.b") as whole, bus.subscribe("a.b") as sign:
        for number in range(20):
            await bus.publish("a.b", str(number).encode())
        await take(sign, 20)  # which comes after the other's
        taken = await take(whole, 3)
        taken += whole.take_waiting()
        assert [int(message.data) for message in taken] == list(range(20))
        assert whole.take_waiting() == []
        await bus.publish("a.b", b"20")
        assert [message.data for message in await take(whole, 1)] == [b"20"]


async def test_a_message_keeps_subject_reply_and_headers(net: Net) -> None:
    one, two = await net.client("one"), await net.client("two")
    async with two.subscribe("a.*") as subscription:
        await one.publish("a.b", b"\x00\xff", reply="r.1", headers={"X-Id": "7"})
        await one.publish("a.c", b"")
        first, second = await take(subscription, 2)
    assert (first.subject, first.data, first.reply, dict(first.headers)) == ("a.b", b"\x00\xff", "r.1", {"X-Id": "7"})
    assert (second.subject, second.data, second.reply, dict(second.headers)) == ("a.c", b"", None, {})


@pytest.mark.parametrize(
    ("pattern", "hit", "miss"),
    [
        ("a.*.c", "a.b.c", "a.b.b.c"),
        ("a.>", "a.b.c", "a"),
        ("*", "a", "a.b"),
        ("*.b.>", "a.b.c", "a.b"),
        ("a.b", "a.b", "a.c"),
    ],
)
async def test_wildcards_are_those_of_nats(net: Net, pattern: str, hit: str, miss: str) -> None:
    bus = await net.client("one")
    async with bus.subscribe(pattern) as subscription:
        await bus.publish(miss, b"miss")
        await bus.publish(hit, b"hit")
        assert [m.data for m in await take(subscription, 1)] == [b"hit"]


async def test_every_plain_listener_and_one_of_each_group_gets_a_message(net: Net) -> None:
    one, two = await net.client("one"), await net.client("two")
    async with (
        one.subscribe("job") as plain,
        one.subscribe("job", queue="g") as left,
        two.subscribe("job", queue="g") as right,
        two.subscribe("job", queue="h") as other,
        two.subscribe("end") as end,
    ):
        for number in range(60):
            await one.publish("job", str(number).encode())
        await one.publish("end", b"")
        await take(end, 1)
        assert len(await take(plain, 60)) == 60
        assert len(await take(other, 60)) == 60
        shared: list[bytes] = []

        async def drain(subscription: Subscription) -> None:
            async for message in subscription:
                shared.append(message.data)

        async with asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(drain(left)), tasks.create_task(drain(right))]
            await eventually(lambda: len(shared) == 60)
            for reader in readers:
                reader.cancel()
        assert sorted(int(data) for data in shared) == list(range(60))


async def test_a_request_gets_its_own_answer(net: Net) -> None:
    server, client = await net.client("server"), await net.client("client")
    async with echo(server, "echo"):
        answers = await asyncio.gather(
            *(client.request("echo", str(n).encode(), timeout_s=WAIT_S, headers={"N": str(n)}) for n in range(50))
        )
    assert [(int(a.data), a.headers["N"]) for a in answers] == [(n, str(n)) for n in range(50)]


async def test_a_request_to_nobody_fails_at_once(net: Net) -> None:
    client = await net.client("client")
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(NoResponders, match="nobody listens"):
            await client.request("nobody.there", b"", timeout_s=600)


async def test_a_request_without_answer_runs_into_its_deadline(net: Net) -> None:
    server, client = await net.client("server"), await net.client("client")
    async with server.subscribe("deaf"):
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await client.request("deaf", b"", timeout_s=0.05)


async def test_a_cancelled_request_leaves_the_client_usable(net: Net) -> None:
    server, client = await net.client("server"), await net.client("client")
    async with server.subscribe("slow") as slow, echo(server, "echo"):
        task = asyncio.create_task(client.request("slow", b"", timeout_s=600))
        (asked,) = await take(slow, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asked.reply is not None
        await server.publish(asked.reply, b"late")
        assert (await client.request("echo", b"x", timeout_s=WAIT_S)).data == b"x"


async def test_what_is_too_large_is_refused_before_it_is_sent(net: Net) -> None:
    bus = await net.client("one")
    assert bus.max_payload_bytes == MAX_PAYLOAD_BYTES
    async with bus.subscribe("big") as subscription:
        with pytest.raises(PayloadTooLarge, match=str(MAX_PAYLOAD_BYTES)):
            await bus.publish("big", bytes(MAX_PAYLOAD_BYTES + 1))
        with pytest.raises(PayloadTooLarge):
            await bus.publish("big", bytes(MAX_PAYLOAD_BYTES), headers={"K": "v"})
        with pytest.raises(PayloadTooLarge):
            await bus.request("big", bytes(MAX_PAYLOAD_BYTES + 1), timeout_s=WAIT_S)
        await bus.publish("big", bytes(MAX_PAYLOAD_BYTES))
        (message,) = await take(subscription, 1)
    assert len(message.data) == MAX_PAYLOAD_BYTES


async def test_a_full_subscription_sheds_and_counts(net: Net) -> None:
    bus = await net.client("one")
    async with bus.subscribe("flood", max_pending=10) as slow, bus.subscribe("flood") as fast:
        for number in range(100):
            await bus.publish("flood", str(number).encode())
        await take(fast, 100)
        await eventually(lambda: slow.dropped == 90)
        assert [int(m.data) for m in await take(slow, 10)] == list(range(10))
        await bus.publish("flood", b"100")
        assert [m.data for m in await take(slow, 1)] == [b"100"]
        assert (slow.dropped, fast.dropped) == (90, 0)


@pytest.mark.parametrize("subject", ["", "a..b", "a b", ".a", "a.", "a.\r\nPUB x", "a.*", "a.>"])
async def test_a_malformed_subject_is_refused(net: Net, subject: str) -> None:
    bus = await net.client("one")
    with pytest.raises(InvalidRequest, match="not a subject"):
        await bus.publish(subject, b"")
    with pytest.raises(InvalidRequest, match="not a subject"):
        await bus.request(subject, b"", timeout_s=1)
    async with bus.subscribe("a") as subscription:
        await bus.publish("a", b"alive")
        assert [m.data for m in await take(subscription, 1)] == [b"alive"]


@pytest.mark.parametrize("pattern", ["", "a.>.b", "a.b*", "a.>b", "a b"])
async def test_a_malformed_pattern_is_refused(net: Net, pattern: str) -> None:
    bus = await net.client("one")
    with pytest.raises(InvalidRequest, match="not a subject"):
        async with bus.subscribe(pattern):
            pass


async def test_leaving_a_subscription_withdraws_it(net: Net) -> None:
    server, client = await net.client("server"), await net.client("client")
    async with server.subscribe("s"):
        pass
    with pytest.raises(NoResponders):
        await client.request("s", b"", timeout_s=WAIT_S)


async def test_unsubscribing_ends_a_waiting_iteration(net: Net) -> None:
    bus = await net.client("one")
    async with bus.subscribe("s") as subscription:
        waiting = asyncio.create_task(take(subscription, 1))
        await bus.publish("t", b"")
        await subscription.unsubscribe()
        assert await waiting == []
        await subscription.unsubscribe()


async def test_closing_ends_subscriptions_and_is_idempotent(net: Net) -> None:
    bus, other = await net.client("one"), await net.client("other")
    async with other.subscribe("last") as last:
        async with bus.subscribe("s") as subscription:
            waiting = asyncio.create_task(take(subscription, 1))
            await bus.publish("last", b"words")
            await bus.close()
            await bus.close()
            assert await waiting == []
        assert [m.data for m in await take(last, 1)] == [b"words"]
    assert not bus.connected
    with pytest.raises(BusDisconnected, match="closed"):
        await bus.publish("s", b"")
    with pytest.raises(BusDisconnected, match="closed"):
        await bus.wait_connected()


async def test_an_outage_fails_everything_at_once_with_a_type(net: Net) -> None:
    server, client = await net.client("server"), await net.client("client")
    async with server.subscribe("deaf") as deaf:
        task = asyncio.create_task(client.request("deaf", b"", timeout_s=600))
        await take(deaf, 1)
        await net.outage()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(BusDisconnected):
                await task
        await eventually(lambda: not client.connected and not server.connected)
        with pytest.raises(BusDisconnected) as caught:
            await client.publish("deaf", b"")
        assert caught.value.retry_after_s is not None
        with pytest.raises(BusDisconnected):
            await client.request("deaf", b"", timeout_s=600)
        with pytest.raises(BusDisconnected):
            async with client.subscribe("x"):
                pass


async def test_an_outage_is_counted_even_when_nobody_looked(net: Net) -> None:
    async with asyncio.timeout(20):
        bus = await net.client("bus")
        assert bus.outages == 0
        await net.outage()
        await net.recovery()
        await eventually(lambda: bus.connected and bus.outages > 0)
        seen = bus.outages
        await bus.publish("a", b"")
        assert bus.outages == seen


async def test_who_waits_for_the_bus_waits_while_it_is_away_again() -> None:
    """In memory alone: with a server nobody could tell when a waiter runs."""
    bus = MemoryBroker().client("one")
    bus.disconnect()
    waiting = asyncio.create_task(bus.wait_connected())
    await asyncio.sleep(0)
    bus.reconnect()
    bus.disconnect()  # before it has run
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    bus.reconnect()
    async with asyncio.timeout(WAIT_S):
        await waiting
    bus.disconnect()
    waiting = asyncio.create_task(bus.wait_connected())
    await asyncio.sleep(0)
    await bus.close()
    with pytest.raises(BusDisconnected, match="closed"):
        await waiting


async def test_after_an_outage_subscriptions_are_alive_again(net: Net) -> None:
    server, client = await net.client("server"), await net.client("client")
    async with echo(server, "echo"), client.subscribe("plain") as plain:
        await net.outage()
        await eventually(lambda: not client.connected and not server.connected)
        back = asyncio.create_task(client.wait_connected())
        await net.recovery()
        async with asyncio.timeout(WAIT_S):
            await back
            await server.wait_connected()
        assert (await client.request("echo", b"again", timeout_s=WAIT_S)).data == b"again"
        await server.publish("plain", b"hello")
        assert [m.data for m in await take(plain, 1)] == [b"hello"]


async def test_a_subscription_left_during_an_outage_stays_gone(net: Net) -> None:
    server, client = await net.client("server"), await net.client("client")
    async with server.subscribe("s"):
        await net.outage()
        await eventually(lambda: not client.connected and not server.connected)
    await net.recovery()
    async with asyncio.timeout(WAIT_S):
        await client.wait_connected()
        await server.wait_connected()
    with pytest.raises(NoResponders):
        await client.request("s", b"", timeout_s=WAIT_S)


async def test_inboxes_differ(net: Net) -> None:
    bus, other = await net.client("one"), await net.client("two")
    inboxes = {client.new_inbox() for client in (bus, other) for _ in range(100)}
    assert len(inboxes) == 200
    async with bus.subscribe(inboxes.pop()) as subscription:
        await other.publish(subscription.subject, b"x")
        assert len(await take(subscription, 1)) == 1
