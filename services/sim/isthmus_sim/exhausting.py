"""Faults that take memory: staging, KV blocks, the accelerator's."""

from __future__ import annotations

import asyncio
from itertools import count

from isthmus_shared.engines.port import EngineRequest
from isthmus_shared.errors import IsthmusError
from isthmus_shared.ids import Generation, Incarnation, RequestId, TransferId, WorkerId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages.work import SamplingParams, WorkerRef
from isthmus_sim.cluster import Cluster
from isthmus_sim.faults import Planned
from isthmus_sim.loop import Life
from isthmus_sim.process import Process
from isthmus_sim.relay import Relay, SimLink
from isthmus_sim.services import Worker
from isthmus_sim.targets import back, one_of


async def staging_full(cluster: Cluster, planned: Planned) -> None:
    """Another worker of that node stages all that its relay gives."""
    node = one_of(cluster.nodes, planned)
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


async def kv_full(cluster: Cluster, planned: Planned) -> None:
    """Somebody else's sequences take most of an engine's blocks."""
    worker = one_of(cluster.workers, planned)
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


async def engine_failure(cluster: Cluster, planned: Planned) -> None:
    worker = one_of(cluster.workers, planned)
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
        await back(cluster, worker)
