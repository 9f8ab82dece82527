"""The frame of a contender of two processes, a target that says how to reach it and a source that moves bytes to it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import xxhash

from isthmus_kvrelay.bench.children import Message, serve
from isthmus_kvrelay.bench.workloads import POOL_BYTES, WORKLOADS, Workload


class PairEnd(Protocol):
    @property
    def pool(self) -> memoryview: ...


class PairSource(PairEnd, Protocol):
    def transfer(self, workload: Workload) -> None:
        """Returns when the bytes are in place at the target. Blocks at the target are `Workload.scattered`'s."""
        ...


class PairTarget(PairEnd, Protocol):
    @property
    def told(self) -> Message:
        """What the source must know, as JSON."""
        ...


def source_pool() -> memoryview:
    return memoryview(np.random.default_rng(1).integers(0, 256, POOL_BYTES, dtype=np.uint8).data)


def target_pool() -> memoryview:
    return memoryview(np.ones(POOL_BYTES, dtype=np.uint8).data)


def arguments_of(more: Callable[[argparse.ArgumentParser], Any]) -> tuple[argparse.Namespace, Message | None]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--peer", help="what the target said; without it this is the target")
    more(parser)
    arguments = parser.parse_args()
    return arguments, json.loads(arguments.peer) if arguments.peer else None


def serve_source(fd: int, source: PairSource) -> None:
    def handle(message: Message) -> Message:
        workload = WORKLOADS[message["workload"]]
        if message["do"] == "digest":
            return {"digest": _digest(source.pool, workload, 0)}
        limits = {name: message[name] for name in ("min_s", "min_n", "max_n")}
        return {"took_s": _series(source, workload, **limits)}

    serve(fd, handle, first={})


def serve_target(fd: int, target: PairTarget) -> None:
    def handle(message: Message) -> Message:
        return {"digest": _digest(target.pool, WORKLOADS[message["workload"]], 1)}

    serve(fd, handle, first=target.told)


def _series(source: PairSource, workload: Workload, *, min_s: float, min_n: int, max_n: int) -> list[float]:
    took_s: list[float] = []
    end_s = time.perf_counter() + min_s
    while len(took_s) < max_n and (len(took_s) < min_n or time.perf_counter() < end_s):
        began_s = time.perf_counter()
        source.transfer(workload)
        took_s.append(time.perf_counter() - began_s)
    return took_s


def _digest(pool: memoryview, workload: Workload, side: int) -> str:
    whole = xxhash.xxh3_64()
    for each in workload.scattered():
        whole.update(pool[each[side] : each[side] + each[2]])
    return str(whole.hexdigest())
