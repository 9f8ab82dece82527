"""The clients of a relay measurement: a producer at one relay, a consumer at the other, one transfer after another.

A transfer's time runs from declaring the first block filled until the consumer may read: declare every block, seal,
open the source, ready. Its staging is reserved before, as a peer's memory is registered before; `reserve_s` says what
that took. What is in the slots is written once, before. With `copies` each block is also copied from scattered memory
into the staging and out of it into scattered memory, within the time.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from itertools import count

import numpy as np
import uvloop

from isthmus_kvrelay.bench.children import Message, serve
from isthmus_kvrelay.bench.workloads import POOL_BYTES, WORKLOADS, Workload
from isthmus_kvrelay.client import RelayClient
from isthmus_shared.engines.kv_port import KvSink, KvSource
from isthmus_shared.ids import Generation, NodeId, TransferId, WorkerId, new_id, new_incarnation
from isthmus_shared.kv.manifest import GroupKind, KvDtype, KvGroup, KvManifest
from isthmus_shared.messages.work import KvTicket, WorkerRef

G1 = Generation(1)
DEADLINE_S = 60.0
CONNECT_TIMEOUT_S = 10.0
BYTES_PER_TOKEN = 4096


def manifest_of(total_bytes: int) -> KvManifest:
    tokens, width = total_bytes // BYTES_PER_TOKEN, BYTES_PER_TOKEN // 4
    group = KvGroup(kind=GroupKind.FULL, layer_ids=(0,), kv_heads=1, head_dim=width, token_start=0, token_end=tokens)
    return KvManifest(model_fingerprint="bench", dtype=KvDtype.FP16, prompt_tokens=tokens, groups=(group,))


class Driver:
    def __init__(self, producer: RelayClient, consumer: RelayClient, seed: int) -> None:
        self._producer, self._consumer = producer, consumer
        self._bytes = np.random.default_rng(seed).integers(0, 256, POOL_BYTES, dtype=np.uint8)
        self._target = np.ones(POOL_BYTES, dtype=np.uint8)
        self._source_view, self._target_view = memoryview(self._bytes.data), memoryview(self._target.data)
        self._names = count(1)

    async def series(self, workload: Workload, *, min_s: float, min_n: int, max_n: int, copies: bool) -> Message:
        took_s: list[float] = []
        reserve_s: list[float] = []
        end_s = time.perf_counter() + min_s
        while len(took_s) < max_n and (len(took_s) < min_n or time.perf_counter() < end_s):
            reserved_s, moved_s = await self._transfer(workload, copies=copies)
            reserve_s.append(reserved_s)
            took_s.append(moved_s)
        return {"took_s": took_s, "reserve_s": reserve_s}

    async def _transfer(self, workload: Workload, *, copies: bool) -> tuple[float, float]:
        blocks = workload.scattered() if copies else []
        asked_s = time.perf_counter()
        ticket, sink = await self._reserve(workload.total_bytes)
        began_s = time.perf_counter()
        source = await self._consumer.open_source(ticket, deadline_s=DEADLINE_S)
        for number in range(workload.blocks):
            start = number * workload.block_bytes
            if copies:
                _write(sink, start, self._source_view[blocks[number][0] :][: workload.block_bytes])
            sink.filled(start, workload.block_bytes)
        sink.seal()
        await source.ready()
        if copies:
            for number, (_, there, size) in enumerate(blocks):
                _read(source, number * size, self._target_view[there : there + size])
        took_s = time.perf_counter() - began_s
        source.release()
        return began_s - asked_s, took_s

    async def prepare(self, flows: int, total_bytes: int) -> list[Message]:
        """Sealed transfers that wait for a consumer: tickets."""
        tickets = []
        for _ in range(flows):
            ticket, sink = await self._reserve(total_bytes)
            sink.filled(0, total_bytes)
            sink.seal()
            tickets.append(ticket.model_dump(mode="json"))
        return tickets

    async def _reserve(self, total_bytes: int) -> tuple[KvTicket, KvSink]:
        transfer, manifest = TransferId(new_id("xfer")), manifest_of(total_bytes)
        sink = await self._producer.open_sink(transfer, G1, manifest, deadline_s=DEADLINE_S, wait_s=DEADLINE_S)
        return KvTicket(transfer_id=transfer, generation=G1, source=self._producer.relay, manifest=manifest), sink

    async def fill(self, workload: Workload) -> bool:
        """One transfer whose bytes are written before and compared after; leaves them in the slots."""
        total = workload.total_bytes
        data = np.roll(self._bytes[:total], next(self._names) * 8)
        ticket, sink = await self._reserve(total)
        _write(sink, 0, memoryview(data.data))
        sink.filled(0, total)
        sink.seal()
        source = await self._consumer.open_source(ticket, deadline_s=DEADLINE_S)
        await source.ready()
        got = np.empty(total, dtype=np.uint8)
        _read(source, 0, memoryview(got.data))
        source.release()
        return bool(np.array_equal(got, data))


def _write(sink: KvSink, start: int, data: memoryview) -> None:
    _copy(sink.map(start, len(data)), data, into_views=True)


def _read(source: KvSource, start: int, into: memoryview) -> None:
    _copy(source.map(start, len(into)), into, into_views=False)


def _copy(views: Sequence[memoryview], flat: memoryview, *, into_views: bool) -> None:
    done = 0
    for view in views:
        part = flat[done : done + len(view)]
        if into_views:
            view[:] = part
        else:
            part[:] = view
        done += len(view)


async def answer(driver: Driver, message: Message) -> Message:
    match message["do"]:
        case "fill":
            return {"intact": await driver.fill(WORKLOADS[message["workload"]])}
        case "prepare":
            return {"tickets": await driver.prepare(message["flows"], message["total_bytes"])}
        case _:
            limits = {name: message[name] for name in ("min_s", "min_n", "max_n")}
            return await driver.series(WORKLOADS[message["workload"]], copies=message["copies"], **limits)


async def connect(path: str, name: str) -> RelayClient:
    worker = WorkerRef(worker_id=WorkerId(name), incarnation=new_incarnation(), node_id=NodeId(name))
    return await RelayClient.connect(path, worker=worker, timeout_s=CONNECT_TIMEOUT_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--producer", required=True, help="socket of the producer's relay")
    parser.add_argument("--consumer", required=True, help="socket of the consumer's relay")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        producer = runner.run(connect(arguments.producer, "producer"))
        consumer = runner.run(connect(arguments.consumer, "consumer"))
        driver = Driver(producer, consumer, arguments.seed)

        def handle(message: Message) -> Message:
            return runner.run(answer(driver, message))

        serve(arguments.fd, handle, first={})
        runner.run(producer.close())
        runner.run(consumer.close())


if __name__ == "__main__":
    main()
