"""A decode worker of a burst: the `sim` engine steps with resident sequences while KV lands on its node.

``python -m isthmus_kvrelay.bench.decode_process --fd N --socket PATH``. Asked `quiet` it measures inter-token latency
alone; asked `burst` it opens all the tickets' sources at once and measures until the last one is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable

import uvloop

from isthmus_kvrelay.bench.children import Message, serve
from isthmus_kvrelay.client import RelayClient
from isthmus_shared.engines.batching import BatchingEngine
from isthmus_shared.engines.config import EngineConfig, EngineKind
from isthmus_shared.engines.port import Engine, EngineRequest
from isthmus_shared.engines.sim import SimRunner
from isthmus_shared.ids import NodeId, RequestId, WorkerId, new_id, new_incarnation
from isthmus_shared.messages.work import KvTicket, SamplingParams, WorkerRef

RESIDENT = 16
"""Sequences that decode all the while."""
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 30_000
"""More than any measurement sees."""
KV_BLOCKS = 100_000
"""Room for every resident sequence to its end."""
KV_BLOCK_TOKENS = 16
"""Of the engine's default layout."""
ITL_TARGET_MS = 10.0
"""A step alone takes 6.5 ms."""
DEADLINE_S = 60.0
CONNECT_TIMEOUT_S = 10.0


class Decode:
    def __init__(self, engine: Engine, client: RelayClient) -> None:
        self._engine, self._client = engine, client
        self._gaps_s: list[float] = []

    async def collect(self) -> None:
        last_s: float | None = None
        async for report in self._engine.steps():
            if report.decode_sequences:
                now_s = time.perf_counter()
                if last_s is not None:
                    self._gaps_s.append(now_s - last_s)
                    self._tell(now_s - last_s)
                last_s = now_s

    def _tell(self, gap_s: float) -> None:
        """What a decode worker tells its relay after each step: credit and feedback follow from it."""
        free = self._engine.load().kv_blocks_free
        self._client.report_step(step_s=gap_s, kv_blocks_free=free, kv_block_tokens=KV_BLOCK_TOKENS)
        self._client.report_itl(gap_s * 1e3, ITL_TARGET_MS)

    async def quiet(self, seconds: float) -> Message:
        self._gaps_s.clear()
        await asyncio.sleep(seconds)
        return {"itl_s": list(self._gaps_s)}

    async def burst(self, tickets: Iterable[KvTicket]) -> Message:
        self._gaps_s.clear()
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for ticket in tickets:
                tasks.create_task(self._take(ticket))
        return {"itl_s": list(self._gaps_s), "took_s": time.perf_counter() - began_s}

    async def _take(self, ticket: KvTicket) -> None:
        source = await self._client.open_source(ticket, deadline_s=DEADLINE_S)
        try:
            await source.ready()
        finally:
            source.release()


async def _start(path: str) -> tuple[Decode, Engine]:
    config = EngineConfig(kind=EngineKind.SIM, model_name="bench", kv_blocks=KV_BLOCKS)
    engine = BatchingEngine(SimRunner(config), config)
    await engine.start()
    worker = WorkerRef(worker_id=WorkerId("decode"), incarnation=new_incarnation(), node_id=NodeId("b"))
    decode = Decode(engine, await RelayClient.connect(path, worker=worker, timeout_s=CONNECT_TIMEOUT_S))
    for number in range(RESIDENT):
        prompt = tuple(range(number, number + PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        engine.submit(EngineRequest(RequestId(new_id("req")), prompt, sampling))
    return decode, engine


async def answer(decode: Decode, message: Message) -> Message:
    if message["do"] == "quiet":
        return await decode.quiet(message["seconds"])
    return await decode.burst([KvTicket.model_validate(ticket) for ticket in message["tickets"]])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--socket", required=True)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        decode, engine = runner.run(_start(arguments.socket))
        collecting = runner.get_loop().create_task(decode.collect())
        serve(arguments.fd, lambda message: runner.run(answer(decode, message)), first={})
        runner.run(engine.stop())
        collecting.cancel()


if __name__ == "__main__":
    main()
