"""Workers change their roles again and again while requests run: nobody may notice, and nothing may be left."""

from __future__ import annotations

import random
from asyncio import TaskGroup, sleep

import pytest

from isthmus_shared.errors import IsthmusError
from isthmus_shared.messages import subjects
from isthmus_shared.messages.assign import AssignRoles
from isthmus_shared.messages.health import Role
from isthmus_shared.messages.work import Ack
from isthmus_sim.cluster import Cluster, Size
from isthmus_sim.load import Ask, answers_of_one_engine, draw, verdict
from isthmus_sim.loop import run_world
from isthmus_sim.trace import Trace

LASTS_S = 6.0
EPOCH = 2**40
"""Above the planner's own: it does not interfere."""
CHOICES = ((Role.PREFILL,), (Role.DECODE,), (Role.PREFILL, Role.DECODE))


async def change_roles(cluster: Cluster, rng: random.Random) -> int:
    """At random moments; somebody prefills and somebody decodes at any time."""
    bus = cluster.world.broker.client("leader")
    roles = {worker.name: worker.host.beat().roles for worker in cluster.workers if worker.host is not None}
    taken, left_s = 0, LASTS_S
    while left_s > 0:
        wait_s = rng.uniform(0.05, 0.5)
        left_s -= wait_s
        await sleep(wait_s)
        worker = rng.choice(cluster.workers)
        wanted = rng.choice(CHOICES)
        after = {**roles, worker.name: wanted}
        if {role for has in after.values() for role in has} != set(Role):
            continue
        message = AssignRoles(epoch=EPOCH, incarnation=worker.life, roles=wanted)
        subject = subjects.worker_assign(worker.host.worker.worker_id) if worker.host is not None else ""
        try:
            reply = Ack.decode((await bus.request(subject, message.encode(), timeout_s=1.0)).data)
        except IsthmusError as error:
            raise AssertionError(error.text) from error
        assert reply.fault is None, reply.fault
        roles, taken = after, taken + 1
    await bus.close()
    return taken


async def run(seed: int, asks: list[Ask], problems: list[str]) -> int:
    wanted = await answers_of_one_engine(asks)
    cluster = Cluster(seed, Trace(), Size(slots=128, able=tuple(Role)))
    cluster.world.problems = problems
    await cluster.start()
    async with TaskGroup() as going:
        changing = going.create_task(change_roles(cluster, random.Random(f"{seed}:roles")))
        for ask in asks:
            going.create_task(cluster.ask(ask))
    problems += [text for o in cluster.outcomes if (text := verdict(o, wanted[o.ask.name], faults=False)) is not None]
    await cluster.check_nothing_is_left()
    await cluster.stop()
    return changing.result()


@pytest.mark.parametrize("seed", range(3))
def test_every_stream_is_whole_whatever_roles_its_workers_take(seed: int) -> None:
    problems: list[str] = []
    asks = draw(random.Random(f"{seed}:asks"), seed, 30, over_s=LASTS_S)
    changes = run_world(run(seed, asks, problems))
    assert problems == []
    assert changes >= 5
