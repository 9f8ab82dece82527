"""How each fault is done to a cluster, and undone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from isthmus_sim.bus import MAX_HELD, MAX_PAYLOAD_BYTES
from isthmus_sim.cluster import Cluster
from isthmus_sim.exhausting import engine_failure, kv_full, staging_full
from isthmus_sim.fabric import SILENCE_S
from isthmus_sim.faults import Fault, Planned
from isthmus_sim.process import Service
from isthmus_sim.relay import Relay
from isthmus_sim.services import SimIngress
from isthmus_sim.targets import anyone, back, one_of
from isthmus_sim.weather import CALM_DELAY_S

SLOWNESS = 50.0
HEALED_S = 0.5
"""After a fault is over its traces are still about: a delayed message, a worker that is starting."""
RECONNECT_S = 0.5
"""Within which a client notices that the bus is back."""
ATTACHED_S = 2.5
"""The longest backoff of a worker that attaches again, and some."""


async def inflict(cluster: Cluster, planned: Planned) -> None:
    """Waits for its time, does it, and heals it."""
    await asyncio.sleep(planned.at_s)
    with cluster.disturbed(planned.fault, HEALED_S) as trace:
        trace(f"lasts {planned.lasts_s:.3f} s, pick {planned.pick}, coin {int(planned.coin)}")
        await _HOW[planned.fault](cluster, planned)
        trace("healed")


# -- processes


async def _worker_crash(cluster: Cluster, planned: Planned) -> None:
    worker = one_of(cluster.workers, planned)
    if worker is None:
        return
    silenced = cluster.world.broker.silenced
    if planned.coin:
        silenced.add(worker.node.name)  # its heartbeats' end must be noticed instead
    await worker.crash()
    await asyncio.sleep(planned.lasts_s)
    silenced.discard(worker.node.name)
    if worker.process is None:
        worker.start()
    await back(cluster, worker)


async def _crash(cluster: Cluster, service: Service | None, planned: Planned, *, settle_s: float) -> None:
    if service is None:
        return
    if isinstance(service, SimIngress):
        cluster.cut_clients(service)
    await service.crash()
    await asyncio.sleep(planned.lasts_s)
    if service.process is None:
        service.start()
    await asyncio.sleep(settle_s)


async def _planner_crash(cluster: Cluster, planned: Planned) -> None:
    await _crash(
        cluster, one_of(cluster.planners, planned), planned, settle_s=1.0
    )  # it hears everyone within two beats


async def _ingress_crash(cluster: Cluster, planned: Planned) -> None:
    await _crash(cluster, one_of(cluster.ingresses, planned), planned, settle_s=0.0)


async def _relay_loss(cluster: Cluster, planned: Planned) -> None:
    await _crash(cluster, one_of(cluster.nodes, planned), planned, settle_s=ATTACHED_S)


async def _restart(cluster: Cluster, service: Service | None, planned: Planned) -> None:
    """In order: it drains first."""
    if service is None or not service.ready:
        return
    process = service.process
    await service.drain()
    await asyncio.sleep(planned.lasts_s)
    if service.process is process:  # else it crashed while it drained, and has been started anew
        service.start()
    await back(cluster, service)


async def _worker_restart(cluster: Cluster, planned: Planned) -> None:
    await _restart(cluster, one_of(cluster.workers, planned), planned)


async def _ingress_restart(cluster: Cluster, planned: Planned) -> None:
    await _restart(cluster, one_of(cluster.ingresses, planned), planned)


async def _relay_restart(cluster: Cluster, planned: Planned) -> None:
    await _restart(cluster, one_of(cluster.nodes, planned), planned)
    await asyncio.sleep(ATTACHED_S)


async def _pause(cluster: Cluster, planned: Planned) -> None:
    service = anyone(cluster, planned)
    if service is None or service.process is None or service.process.life.paused:
        return
    life = service.process.life
    cluster.world.trace.note(life.name, "paused")
    life.pause()
    await asyncio.sleep(min(planned.lasts_s, SILENCE_S))
    if isinstance(service, Relay) and planned.lasts_s > SILENCE_S and service.daemon is not None:
        cluster.world.fabric.cut(service.daemon.transport)
    await asyncio.sleep(max(0.0, planned.lasts_s - SILENCE_S))
    cluster.world.trace.note(life.name, "runs again")
    life.resume()
    await asyncio.sleep(ATTACHED_S if isinstance(service, Relay) else 1.0)


# -- the bus


async def _bus_outage(cluster: Cluster, planned: Planned) -> None:
    await _without_bus(cluster, planned.lasts_s, within_s=0.0)


async def _bus_restart(cluster: Cluster, planned: Planned) -> None:
    await _without_bus(cluster, min(planned.lasts_s, 1.0), within_s=RECONNECT_S)
    await asyncio.sleep(RECONNECT_S)


async def _without_bus(cluster: Cluster, lasts_s: float, *, within_s: float) -> None:
    cluster.outages += 1
    cluster.world.broker.disconnect()
    await asyncio.sleep(lasts_s)
    cluster.outages -= 1
    if cluster.outages == 0:
        cluster.world.broker.reconnect(within_s=within_s)


async def _payload_limit(cluster: Cluster, planned: Planned) -> None:
    broker = cluster.world.broker
    for limit in ((700, 2500)[planned.pick % 2], MAX_PAYLOAD_BYTES):
        broker.max_payload_bytes = limit
        await _without_bus(cluster, 0.1, within_s=RECONNECT_S)
        await asyncio.sleep(planned.lasts_s if limit != MAX_PAYLOAD_BYTES else RECONNECT_S)


async def _bus_partition(cluster: Cluster, planned: Planned) -> None:
    service = anyone(cluster, planned)
    if service is None or service.process is None:
        return
    bus = service.process.bus
    cluster.world.trace.note(bus.name, "cut off from the bus")
    if planned.coin:
        bus.disconnect()
        await asyncio.sleep(planned.lasts_s)
        if not cluster.world.broker.down:
            bus.reconnect()
    else:
        way = planned.pick // 7 % 3
        bus.hold(sending=way != 1, receiving=way != 2)
        await asyncio.sleep(planned.lasts_s)
        bus.heal()
    await asyncio.sleep(0.5)


async def _route_split(cluster: Cluster, planned: Planned) -> None:
    names = [each.name for each in cluster.services]
    one, other = names[planned.pick % len(names)], names[planned.pick // len(names) % len(names)]
    ways = [(one, other)] if planned.coin else [(one, other), (other, one)]
    splits = cluster.world.broker.splits
    cluster.world.trace.note(one, f"{'is not heard by' if planned.coin else 'and'} {other}")
    for way in ways:
        splits[way] = splits.get(way, 0) + 1
    await asyncio.sleep(planned.lasts_s)
    for way in ways:
        splits[way] -= 1
    await asyncio.sleep(0.5)


async def _slow_consumer(cluster: Cluster, planned: Planned) -> None:
    """It takes nothing for a while, and has little room for what then comes at once, here or in the server."""
    service = anyone(cluster, planned)
    if service is None or service.process is None:
        return
    bus, room = service.process.bus, (1, 2, 8)[planned.pick % 3]
    cluster.world.trace.note(bus.name, f"takes nothing; {room} messages may wait")
    if planned.coin:
        bus.max_held = 10 * room
    else:
        bus.narrow(room)
    bus.hold(sending=False, receiving=True)
    await asyncio.sleep(min(planned.lasts_s, 1.0))
    bus.heal()
    await asyncio.sleep(0.5)
    bus.max_held = MAX_HELD
    bus.narrow(None)


async def _delays(cluster: Cluster, planned: Planned) -> None:
    weather = cluster.world.weather
    weather.delay_s = (0.01, 0.05, 0.3)[planned.pick % 3]
    weather.spread_s = weather.delay_s if planned.coin else 0.0
    await asyncio.sleep(planned.lasts_s)
    weather.delay_s, weather.spread_s = CALM_DELAY_S, 0.0


async def _shed_events(cluster: Cluster, planned: Planned) -> None:
    cluster.world.weather.shed_chance = (0.01, 0.1)[planned.pick % 2]
    await asyncio.sleep(planned.lasts_s)
    cluster.world.weather.shed_chance = 0.0


async def _repeated_messages(cluster: Cluster, planned: Planned) -> None:
    cluster.world.weather.repeat_chance = 0.3
    await asyncio.sleep(planned.lasts_s)
    cluster.world.weather.repeat_chance = 0.0


async def _lingering_requests(cluster: Cluster, planned: Planned) -> None:
    cluster.world.weather.linger_chance = 0.3
    await asyncio.sleep(planned.lasts_s)
    cluster.world.weather.linger_chance = 0.0
    await asyncio.sleep(1.0)


# -- nodes, lanes, memory


async def _slow_worker(cluster: Cluster, planned: Planned) -> None:
    runner = cluster.workers[planned.pick % len(cluster.workers)].runner
    if runner is not None:
        runner.slowness = SLOWNESS
        await asyncio.sleep(planned.lasts_s)
        runner.slowness = 1.0


async def _slow_node(cluster: Cluster, planned: Planned) -> None:
    worker = cluster.workers[planned.pick % len(cluster.workers)]
    slowness, runner = cluster.world.fabric.slowness, worker.runner
    slowness[worker.node.name] = SLOWNESS
    if runner is not None:
        runner.slowness = SLOWNESS / 5
    await asyncio.sleep(planned.lasts_s)
    slowness.pop(worker.node.name, None)
    if runner is not None:
        runner.slowness = 1.0
    await asyncio.sleep(0.5)


async def _lane_loss(cluster: Cluster, planned: Planned) -> None:
    daemon = cluster.nodes[planned.pick % len(cluster.nodes)].daemon
    if daemon is not None:
        cluster.world.fabric.cut(daemon.transport)
        await asyncio.sleep(0.01)


async def _lane_partition(cluster: Cluster, planned: Planned) -> None:
    fabric = cluster.world.fabric
    prefill, decode = cluster.nodes[planned.pick % 2].name, cluster.nodes[2 + planned.pick // 2 % 2].name
    ways = [(prefill, decode), (decode, prefill)]
    if planned.coin:
        del ways[planned.pick // 4 % 2]
    cluster.world.trace.note(prefill, "cut off from", node=decode, ways=len(ways))
    for way in ways:
        fabric.hold(*way)
    await asyncio.sleep(min(planned.lasts_s, SILENCE_S))
    if planned.lasts_s > SILENCE_S:
        fabric.cut_between(prefill, decode)
    await asyncio.sleep(max(0.0, planned.lasts_s - SILENCE_S))
    for way in ways:
        fabric.heal(*way)
    await asyncio.sleep(0.1)


async def _corruption(cluster: Cluster, planned: Planned) -> None:
    cluster.world.fabric.corrupt_chance = 0.2
    await asyncio.sleep(planned.lasts_s)
    cluster.world.fabric.corrupt_chance = 0.0


async def _late_chunks(cluster: Cluster, planned: Planned) -> None:
    cluster.world.fabric.late_chance = 0.2
    await asyncio.sleep(planned.lasts_s)
    cluster.world.fabric.late_chance = 0.0
    await asyncio.sleep(1.0)


async def _repeated_chunks(cluster: Cluster, planned: Planned) -> None:
    cluster.world.fabric.repeat_chance = 0.5
    cluster.world.fabric.late_chance = 0.1 if planned.coin else 0.0
    await asyncio.sleep(planned.lasts_s)
    cluster.world.fabric.repeat_chance = cluster.world.fabric.late_chance = 0.0
    await asyncio.sleep(1.0)


_HOW: dict[Fault, Callable[[Cluster, Planned], Awaitable[None]]] = {
    Fault.WORKER_CRASH: _worker_crash,
    Fault.WORKER_RESTART: _worker_restart,
    Fault.PLANNER_CRASH: _planner_crash,
    Fault.INGRESS_CRASH: _ingress_crash,
    Fault.INGRESS_RESTART: _ingress_restart,
    Fault.RELAY_LOSS: _relay_loss,
    Fault.RELAY_RESTART: _relay_restart,
    Fault.PAUSE: _pause,
    Fault.BUS_OUTAGE: _bus_outage,
    Fault.BUS_RESTART: _bus_restart,
    Fault.BUS_PARTITION: _bus_partition,
    Fault.ROUTE_SPLIT: _route_split,
    Fault.SLOW_CONSUMER: _slow_consumer,
    Fault.PAYLOAD_LIMIT: _payload_limit,
    Fault.DELAYS: _delays,
    Fault.SHED_EVENTS: _shed_events,
    Fault.REPEATED_MESSAGES: _repeated_messages,
    Fault.LINGERING_REQUESTS: _lingering_requests,
    Fault.SLOW_WORKER: _slow_worker,
    Fault.SLOW_NODE: _slow_node,
    Fault.LANE_LOSS: _lane_loss,
    Fault.LANE_PARTITION: _lane_partition,
    Fault.CORRUPTION: _corruption,
    Fault.LATE_CHUNKS: _late_chunks,
    Fault.REPEATED_CHUNKS: _repeated_chunks,
    Fault.STAGING_FULL: staging_full,
    Fault.KV_FULL: kv_full,
    Fault.ENGINE_FAILURE: engine_failure,
}
