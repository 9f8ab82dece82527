"""Leadership over a real NATS: exclusive, and followed in time, whichever process or server dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import structlog

from isthmus_planner.leader.bucket import JetStreamStore
from isthmus_planner.leader.keeper import LeaseKeeper
from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.bus.server import EmbeddedNats
from isthmus_shared.ids import new_incarnation
from isthmus_testing import eventually
from isthmus_testing.leaders import Planner, Watch
from isthmus_testing.nats_cluster import nats_cluster

WAIT_S = 60.0
"""For an election of the servers' own, on a loaded machine."""


async def planner_on(server: EmbeddedNats, stack: AsyncExitStack, *, replicas: int, watch: Watch) -> Planner:
    me = new_incarnation()
    bus = await stack.enter_async_context(await NatsBus.connect(server.url, name=f"planner-{me}"))
    store = JetStreamStore(bus, replicas=replicas)
    keeper = LeaseKeeper(store, me, structlog.get_logger(), heard_epoch=lambda: max(watch.epochs, default=0))
    planner = Planner(keeper, asyncio.create_task(keeper.run()), bus)
    stack.push_async_callback(planner.stop)
    watch.planners.append(planner)
    return planner


@asynccontextmanager
async def planners(servers: list[EmbeddedNats], *, replicas: int) -> AsyncIterator[Watch]:
    async with AsyncExitStack() as stack:
        watch = Watch()
        for server in servers:
            await planner_on(server, stack, replicas=replicas, watch=watch)
        looking = asyncio.create_task(watch.run())
        yield watch
        looking.cancel()


def other_than(planner: Planner, watch: Watch) -> Iterator[Planner]:
    return (each for each in watch.planners if each is not planner and each.epoch is not None)


@pytest.mark.slow
async def test_in_a_cluster_of_three_servers_one_leads_at_a_time_whatever_dies() -> None:
    async with nats_cluster() as servers, planners(servers, replicas=3) as watch:
        await eventually(lambda: watch.leader is not None, timeout_s=WAIT_S)
        first = watch.leader
        assert first is not None

        await first.stop(kill=True)
        await eventually(lambda: any(other_than(first, watch)), timeout_s=WAIT_S)
        second = watch.leader
        assert second is not None

        await servers[watch.planners.index(second)].stop(kill=True)
        # Its client goes on with another server; the bucket's servers may need a while to elect one of their own.
        led = watch.epochs[-1]
        await eventually(lambda: second.bus.connected and watch.leader is not None, timeout_s=WAIT_S)
        third = watch.leader
        assert third is not None
        await third.stop(kill=True)
        await eventually(lambda: any(other_than(third, watch)), timeout_s=WAIT_S)
        await eventually(lambda: watch.epochs[-1] > led, timeout_s=WAIT_S)
        watch.check()
        assert len(watch.epochs) >= 3


async def test_one_that_stops_is_followed_at_once_and_one_that_dies_within_three_seconds() -> None:
    async with EmbeddedNats() as server, planners([server, server, server], replicas=1) as watch:
        await eventually(lambda: watch.leader is not None, timeout_s=WAIT_S)
        loop = asyncio.get_running_loop()
        first = watch.leader
        assert first is not None
        await first.stop()
        await eventually(lambda: watch.leader is not None, timeout_s=WAIT_S)
        second, began_s = watch.leader, loop.time()
        assert second is not None
        await second.stop(kill=True)
        await eventually(lambda: watch.leader is not None, timeout_s=WAIT_S)
        assert watch.leader not in (first, second)
        assert loop.time() - began_s < 30, "three seconds on a machine that is not ten times slower"
        watch.check()


async def test_a_bus_that_comes_back_without_its_bucket_gets_a_leader_with_a_higher_epoch() -> None:
    async with EmbeddedNats() as server, planners([server, server], replicas=1) as watch:
        await eventually(lambda: bool(watch.epochs), timeout_s=WAIT_S)
        led = watch.epochs[-1]
        await watch.planners[0].bus.request("$JS.API.STREAM.DELETE.KV_isthmus_planner", b"", timeout_s=WAIT_S)
        await eventually(lambda: bool(watch.epochs) and watch.epochs[-1] > led, timeout_s=WAIT_S)
        watch.check()
