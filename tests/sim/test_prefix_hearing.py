"""Worker and planner over a bus that loses events: once it loses none, the planner knows what the worker has."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import pytest
import structlog

from isthmus_planner.prefix.caches import PrefixCaches
from isthmus_shared.bus.memory import MemoryBroker, MemoryBus
from isthmus_shared.engines.prefix_log import PrefixLog
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import ProcessState, Role, WorkerHeartbeat, WorkerLoad
from isthmus_shared.messages.prefix import PrefixEvents, PrefixSnapshotRequest
from isthmus_shared.prefix import prefix_hashes
from isthmus_shared.simloop import run_simulated
from isthmus_testing.worker_parts import WORKER
from isthmus_worker.prefix_teller import PrefixTeller

PROMPTS = [prefix_hashes([number, *range(64 * 10)], "") for number in range(6)]
BEAT_S = 0.5
CHANGES = 60


class LosingBus(MemoryBus):
    """Loses events with that chance, and answers too."""

    chance = 0.0
    rng = random.Random(0)

    async def publish(
        self, subject: str, data: bytes, *, reply: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        if self.rng.random() >= self.chance:
            await super().publish(subject, data, reply=reply, headers=headers)


def beat(sequence: int) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        incarnation=WORKER.incarnation,
        state=ProcessState.READY,
        interval_s=BEAT_S,
        worker_id=WORKER.worker_id,
        node_id=WORKER.node_id,
        roles=(Role.PREFILL,),
        vendor="cpu",
        engine="sim",
        model="m",
        model_fingerprint="f",
        kv_form="k",
        kv_layout="",
        max_model_len_tokens=100,
        kv_block_tokens=16,
        load=WorkerLoad(),
        prefix_sequence=sequence,
    )


class Pair:
    """A worker whose cache changes at random, and a planner that listens."""

    def __init__(self, seed: int) -> None:
        self.rng, broker = random.Random(seed), MemoryBroker()
        self.bus = LosingBus(broker, "worker")
        self.bus.rng = random.Random(seed + 1)
        self.log = PrefixLog(max_changes=self.rng.choice((3, 1000)))
        self.teller = PrefixTeller(WORKER, self.bus)
        self.teller.follow(self.log)
        self.planner_bus = broker.client("planner")
        self.caches = PrefixCaches(self.planner_bus, structlog.get_logger(), max_hashes=10_000)
        self.held = [0] * len(PROMPTS)

    async def answer(self) -> None:
        async with self.bus.subscribe(subjects.worker_prefixes(WORKER.worker_id)) as asked:
            async for message in asked:
                shown = await self.teller.snapshot(PrefixSnapshotRequest.decode(message.data))
                assert message.reply is not None
                await self.bus.publish(message.reply, shown.encode())

    async def listen(self) -> None:
        async with self.planner_bus.subscribe(subjects.PREFIX_EVENTS) as events:
            async for message in events:
                await self.caches.events(PrefixEvents.decode(message.data))

    async def beats(self) -> None:
        while True:
            if self.rng.random() >= self.bus.chance:
                self.caches.beat(beat(self.teller.sequence))
            await asyncio.sleep(BEAT_S)

    def change(self) -> None:
        number = self.rng.randrange(len(PROMPTS))
        prompt, held = PROMPTS[number], self.held[number]
        count = self.rng.randint(1, 4)
        if self.rng.random() < 0.6:
            self.log.stored(prompt[held : held + count])
            self.held[number] = min(len(prompt), held + count)
        else:
            self.log.removed(prompt[max(0, held - count) : held])
            self.held[number] = max(0, held - count)
        self.teller.notice()

    async def story(self) -> None:
        async with asyncio.TaskGroup() as group:
            loops = [self.teller.run(), self.caches.run(), self.answer(), self.listen(), self.beats()]
            tasks = [group.create_task(loop) for loop in loops]
            await asyncio.sleep(0)
            for _ in range(CHANGES):
                self.bus.chance = self.rng.choice((0.0, 0.3, 1.0))
                self.change()
                await asyncio.sleep(self.rng.choice((0.0, 0.05, 0.3, 1.0)))
            self.bus.chance = 0.0
            await asyncio.sleep(2.0 + 3 * BEAT_S)  # a snapshot that was lost is waited for, and asked for again
            for prompt, held in zip(PROMPTS, self.held, strict=True):
                known = self.caches.index.cached_tokens(prompt).get(WORKER.incarnation, 0)
                assert known == held * 64
            assert len(self.caches.index) == sum(self.held) == len(self.log)
            for task in tasks:
                task.cancel()


@pytest.mark.parametrize("seed", range(20))
def test_what_was_lost_on_the_way_is_made_up_for(seed: int) -> None:
    async def main() -> None:  # the pair belongs to the loop in which it is made
        await Pair(seed).story()

    run_simulated(main())
