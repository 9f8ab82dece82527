"""What seeds have found, each as a schedule of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from isthmus_shared.messages.work import SamplingParams
from isthmus_sim.bus import MAX_PAYLOAD_BYTES
from isthmus_sim.cluster import Cluster, Size
from isthmus_sim.load import Ask, Outcome, prompt_of
from isthmus_sim.loop import run_world
from isthmus_sim.trace import Trace


def in_a_cluster(main: Callable[[Cluster], Awaitable[None]], *, size: Size | None = None) -> None:
    """Starts one, runs `main`, and checks what always holds."""

    async def run() -> None:
        cluster = Cluster(3, Trace(), size)
        await cluster.start()
        await main(cluster)
        await cluster.check_nothing_is_left()
        await cluster.stop()
        assert cluster.world.problems == []

    run_world(run())


async def answered(cluster: Cluster, number: int, *, isl_tokens: int = 60, osl_tokens: int = 5) -> Outcome:
    sampling = SamplingParams(max_tokens=osl_tokens, temperature=0, seed=number, ignore_eos=True)
    return await cluster.ask(Ask(f"client-{number}", 0.0, prompt_of(3, number, isl_tokens), sampling, None))


def test_workers_that_were_only_silent_are_routed_to_with_their_first_beat() -> None:
    """Seed 150: the planner heard its own word that they were lost, and took it for a witness' for five seconds."""

    async def main(cluster: Cluster) -> None:
        for worker in cluster.workers:
            assert worker.process is not None
            worker.process.bus.hold(sending=True, receiving=False)
        await asyncio.sleep(3.0)
        assert (await answered(cluster, 1)).error is not None, "nobody is heard"
        for worker in cluster.workers:
            assert worker.process is not None
            worker.process.bus.heal()
        await asyncio.sleep(1.0)
        outcome = await answered(cluster, 2)
        assert (outcome.error, len(outcome.tokens)) == (None, 5)

    in_a_cluster(main)


def test_no_process_ends_because_the_bus_is_back_with_a_limit_that_its_messages_exceed() -> None:
    """Seeds 16 and 56: heartbeats, and what the ingresses tell of latencies, ended the process that said them."""

    async def main(cluster: Cluster) -> None:
        broker = cluster.world.broker
        assert (await answered(cluster, 1)).error is None
        for limit in (100, MAX_PAYLOAD_BYTES):
            broker.disconnect()
            broker.max_payload_bytes = limit
            broker.reconnect()
            await cluster.nodes[0].crash()  # somebody has something to tell
            await asyncio.sleep(4.0)
            cluster.nodes[0].start()
        await asyncio.sleep(6.0)
        assert [each.name for each in cluster.services if each.process is None or each.process.task.done()] == []
        outcome = await answered(cluster, 2)
        assert (outcome.error, len(outcome.tokens)) == (None, 5)

    in_a_cluster(main)


def test_what_a_relay_expects_over_a_lane_that_was_lost_while_it_was_paused_is_quiet() -> None:
    """Seeds 1695, 5358 and 6000: it went on with what it had been asked before it heard of the loss. The fault was the
    simulated lanes'; `TcpTransport.expect` says at once that nothing will land."""

    async def main(cluster: Cluster) -> None:
        for number in range(4):
            assert (await answered(cluster, number)).error is None, "each decode worker's relay has a lane"
        relays = [node for node in cluster.nodes if node.name.startswith("node-d")]
        for relay in relays:
            assert relay.process is not None
            relay.process.life.pause()
        asked = asyncio.create_task(answered(cluster, 10))
        await asyncio.sleep(0.3)
        for relay in relays:
            assert relay.daemon is not None
            cluster.world.fabric.cut(relay.daemon.transport)
        await asyncio.sleep(0.3)
        for relay in relays:
            assert relay.process is not None
            relay.process.life.resume()
        outcome = await asked
        assert (outcome.error, len(outcome.tokens)) == (None, 5)

    in_a_cluster(main)


def test_a_process_that_was_paused_while_the_bus_came_back_and_went_again_waits_once_more() -> None:
    """Seed 4654: whoever waited for the bus went on as if it were there. The simulated bus and the one in memory broke
    their promise; NATS' client keeps it."""

    async def main(cluster: Cluster) -> None:
        broker, relay = cluster.world.broker, cluster.nodes[0]
        assert relay.process is not None
        broker.disconnect()
        await asyncio.sleep(1.5)  # all that beat wait for it
        relay.process.life.pause()
        broker.reconnect()
        await asyncio.sleep(0.2)
        broker.disconnect()
        relay.process.life.resume()
        await asyncio.sleep(0.2)
        broker.reconnect()
        await asyncio.sleep(3.0)
        assert relay.process is not None
        assert not relay.process.task.done()
        assert (await answered(cluster, 1)).error is None

    in_a_cluster(main)
