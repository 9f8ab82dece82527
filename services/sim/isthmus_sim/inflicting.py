"""How each fault is done to a cluster, and undone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import TypeVar

from isthmus_shared.engines.port import EngineRequest
from isthmus_shared.errors import IsthmusError
from isthmus_shared.ids import Generation, Incarnation, RequestId, TransferId, WorkerId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages.work import SamplingParams, WorkerRef
from isthmus_sim.bus import CALM_DELAY_S, MAX_HELD, MAX_PAYLOAD_BYTES
from isthmus_sim.cluster import Cluster
from isthmus_sim.fabric import SILENCE_S
from isthmus_sim.faults import Fault, Planned
from isthmus_sim.loop import Life
from isthmus_sim.process import Process, Service
from isthmus_sim.relay import Relay, SimLink
from isthmus_sim.services import SimIngress, Worker

SLOWNESS = 50.0
HEALED_S = 0.5
"""After a fault is over its traces are still about: a delayed message, a worker that is starting."""
RECONNECT_S = 0.5
"""Within which a client notices that the bus is back."""
ATTACHED_S = 2.5
"""The longest backoff of a worker that attaches again, and some."""

S = TypeVar("S", bound=Service)


async def inflict(cluster: Cluster, planned: Planned) -> None:
    """Waits for its time, does it, and heals it."""
    await asyncio.sleep(planned.at_s)
    with cluster.disturbed(planned.fault, HEALED_S) as trace:
        trace(f"lasts {planned.lasts_s:.3f} s, pick {planned.pick}, coin {int(planned.coin)}")
        await _HOW[planned.fault](cluster, planned)
        trace("healed")


def _one(services: Sequence[S], planned: Planned) -> S | None:
    """One that runs."""
    alive = [each for each in services if each.process is not None and not each.process.task.done()]
    return alive[planned.pick % len(alive)] if alive else None


def _anyone(cluster: Cluster, planned: Planned) -> Service | None:
    """Workers as often as all others together."""
    return _one([*cluster.workers, *cluster.workers, *cluster.nodes, *cluster.planners, *cluster.ingresses], planned)


async def _back(cluster: Cluster, service: Service) -> None:
    await cluster.settled(lambda: service.ready)


# -- processes


async def _worker_crash(cluster: Cluster, planned: Planned) -> None:
    worker = _one(cluster.workers, planned)
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
    await _back(cluster, worker)


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
    await _crash(cluster, _one(cluster.planners, planned), planned, settle_s=1.0)  # it hears everyone within two beats


async def _ingress_crash(cluster: Cluster, planned: Planned) -> None:
    await _crash(cluster, _one(cluster.ingresses, planned), planned, settle_s=0.0)


async def _relay_loss(cluster: Cluster, planned: Planned) -> None:
    await _crash(cluster, _one(cluster.nodes, planned), planned, settle_s=ATTACHED_S)


async def _restart(cluster: Cluster, service: Service | None, planned: Planned) -> None:
    """In order: it drains first."""
    if service is None or not service.ready:
        return
    process = service.process
    await service.drain()
    await asyncio.sleep(planned.lasts_s)
    if service.process is process:  # else it crashed while it drained, and has been started anew
        service.start()
    await _back(cluster, service)


async def _worker_restart(cluster: Cluster, planned: Planned) -> None:
    await _restart(cluster, _one(cluster.workers, planned), planned)


async def _ingress_restart(cluster: Cluster, planned: Planned) -> None:
    await _restart(cluster, _one(cluster.ingresses, planned), planned)


async def _relay_restart(cluster: Cluster, planned: Planned) -> None:
    await _restart(cluster, _one(cluster.nodes, planned), planned)
    await asyncio.sleep(ATTACHED_S)


async def _pause(cluster: Cluster, planned: Planned) -> None:
    service = _anyone(cluster, planned)
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
    service = _anyone(cluster, planned)
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
    service = _anyone(cluster, planned)
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


async def _staging_full(cluster: Cluster, planned: Planned) -> None:
    """Another worker of that node stages all that its relay gives."""
    node = _one(cluster.nodes, planned)
    engine = next((each.engine for each in cluster.workers if each.ready and each.engine is not None), None)
    if node is None or engine is None:
        return
    life = cluster.world.new_life(f"hog-{node.name}.{node.lives}")
    await life.start(_hog(node, life, engine.manifest(600), planned.lasts_s, cluster), name=life.name)
    await asyncio.sleep(0.1)


async def _hog(node: Relay, life: Life, manifest: KvManifest, lasts_s: float, cluster: Cluster) -> None:
    name = life.name
    worker = WorkerRef(worker_id=WorkerId("hog"), incarnation=Incarnation(name), node_id=node.node_id)
    try:
        link = await SimLink.attach(node, life, worker)
    except IsthmusError:
        return
    try:
        for number in count():
            transfer = TransferId(f"{name}-{number}")
            await link.open_sink(transfer, Generation(1), manifest, deadline_s=60, wait_s=0.01)
    except IsthmusError as error:
        cluster.world.trace.note(name, "holds all there is", said=error.code)
    await asyncio.sleep(lasts_s)
    await link.close()


async def _kv_full(cluster: Cluster, planned: Planned) -> None:
    """Somebody else's sequences take most of an engine's blocks."""
    worker = _one(cluster.workers, planned)
    if worker is None or not worker.ready or worker.engine is None or worker.host is None or worker.process is None:
        return
    engine, process = worker.engine, worker.process
    beat = worker.host.beat()
    tokens = (beat.load.kv_blocks_total - 1) * beat.kv_block_tokens
    sampling = SamplingParams(max_tokens=tokens // 4, temperature=0, ignore_eos=True)
    hog = RequestId(f"hog-{process.name}")
    try:
        process.life.context.run(engine.submit, EngineRequest(hog, (1,) * (tokens * 3 // 4), sampling))
    except IsthmusError:
        return
    await asyncio.sleep(planned.lasts_s)
    process.life.context.run(engine.abort, hog)
    await asyncio.sleep(0.5)


async def _engine_failure(cluster: Cluster, planned: Planned) -> None:
    worker = _one(cluster.workers, planned)
    if worker is None or worker.runner is None:
        return
    runner, process = worker.runner, worker.process
    assert process is not None
    cluster.world.may_fail += 1
    runner.broken = True
    await asyncio.sleep(0.02 if planned.coin else planned.lasts_s)
    runner.broken = False
    await _start_anew(cluster, worker, process)
    cluster.world.may_fail -= 1


async def _start_anew(cluster: Cluster, worker: Worker, process: Process) -> None:
    """What a supervisor does with a process that has ended by itself."""
    await asyncio.sleep(2.5)  # its last words may take that long
    if worker.process is process and process.task.done():
        await worker.crash()
        worker.start()
        await _back(cluster, worker)


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
    Fault.STAGING_FULL: _staging_full,
    Fault.KV_FULL: _kv_full,
    Fault.ENGINE_FAILURE: _engine_failure,
}
