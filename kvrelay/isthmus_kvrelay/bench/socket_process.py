"""The yardstick: blocking sockets in threads, one thread for each stream and side, straight from memory into memory.

A transfer: the source sends a workload's number on every stream, then that stream's share of the blocks; the target
answers with one byte when its share is in place. No checksum, no credit, no pacing, no fence.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

from isthmus_kvrelay.bench.children import Message, serve
from isthmus_kvrelay.bench.workloads import POOL_BYTES, WORKLOADS, Workload

CALL_BYTES = 64 << 20
"""Most that one call moves."""
CALL_BUFFERS = 1024
"""The kernel's limit on buffers of one call."""
NAMES = list(WORKLOADS)


def shares(pool: memoryview, side: int, stream: int, streams: int) -> list[list[memoryview]]:
    """By workload: the blocks that a stream moves, cut into calls. A single block is cut into one part a stream."""
    found = []
    for workload in WORKLOADS.values():
        blocks = workload.scattered() if workload.blocks > 1 else _cut(workload, streams)
        found.append([pool[each[side] : each[side] + each[2]] for each in blocks[stream::streams]])
    return found


def _cut(workload: Workload, streams: int) -> list[tuple[int, int, int]]:
    size = workload.total_bytes // streams
    return [(start * size, start * size, size) for start in range(streams)]


def move(buffers: list[memoryview], call: Any) -> bool:
    """Drive `call` (a `sendmsg` or a receive) over all buffers. False when the other end has closed."""
    first = 0
    while first < len(buffers):
        batch, size = [], 0
        while first < len(buffers) and len(batch) < CALL_BUFFERS and size < CALL_BYTES:
            batch.append(buffers[first])
            size += len(buffers[first])
            first += 1
        while batch:
            moved = call(batch)
            if not moved:
                return False
            while batch and moved >= len(batch[0]):
                moved -= len(batch.pop(0))
            if moved:
                batch[0] = batch[0][moved:]
    return True


class Source:
    def __init__(self, port: int, streams: int) -> None:
        rng = np.random.default_rng(1)
        self.pool = memoryview(rng.integers(0, 256, POOL_BYTES, dtype=np.uint8).data)
        self._ends = []
        for stream in range(streams):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends.append((sock, shares(self.pool, 0, stream, streams)))
        self._threads = ThreadPoolExecutor(streams)

    def series(self, number: int, *, min_s: float, min_n: int, max_n: int) -> list[float]:
        took_s: list[float] = []
        end_s = time.perf_counter() + min_s
        while len(took_s) < max_n and (len(took_s) < min_n or time.perf_counter() < end_s):
            began_s = time.perf_counter()
            if len(self._ends) == 1:
                self._one(self._ends[0], number)
            else:
                list(self._threads.map(self._one, self._ends, [number] * len(self._ends)))
            took_s.append(time.perf_counter() - began_s)
        return took_s

    def _one(self, end: tuple[socket.socket, list[list[memoryview]]], number: int) -> None:
        sock, workloads = end
        sock.sendall(bytes([number]))
        move(workloads[number], sock.sendmsg)
        assert sock.recv(1) == b"."


class Target:
    def __init__(self, streams: int) -> None:
        self.pool = memoryview(np.ones(POOL_BYTES, dtype=np.uint8).data)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._streams = streams

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for stream in range(self._streams):
            sock, _ = self._listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            workloads = shares(self.pool, 1, stream, self._streams)
            threading.Thread(target=self._receive, args=(sock, workloads), daemon=True).start()

    def _receive(self, sock: socket.socket, workloads: list[list[memoryview]]) -> None:
        while number := sock.recv(1):
            move(workloads[number[0]], lambda buffers: sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0])
            sock.sendall(b".")


def digest(pool: memoryview, workload: Workload, side: int) -> str:
    whole = xxhash.xxh3_64()
    for each in workload.scattered() if workload.blocks > 1 else _cut(workload, 1):
        whole.update(pool[each[side] : each[side] + each[2]])
    return str(whole.hexdigest())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--port", type=int, help="of the target; without it this is the target")
    arguments = parser.parse_args()
    source = Source(arguments.port, arguments.streams) if arguments.port else None
    target = None if source else Target(arguments.streams)
    if target is not None:
        target.start()

    def handle(message: Message) -> Message:
        workload = WORKLOADS[message["workload"]]
        if message["do"] == "digest":
            end = source or target
            assert end is not None
            return {"digest": digest(end.pool, workload, 0 if source else 1)}
        assert source is not None
        limits = {name: message[name] for name in ("min_s", "min_n", "max_n")}
        return {"took_s": source.series(NAMES.index(workload.name), **limits)}

    serve(arguments.fd, handle, first={"port": target.port} if target else {})


if __name__ == "__main__":
    main()
