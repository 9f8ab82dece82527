"""The yardstick: blocking sockets in threads, one thread for each stream and side, straight from memory into memory.

A transfer: the source sends a workload's number on every stream, then that stream's share of the blocks; the target
answers with one byte when its share is in place. No checksum, no credit, no pacing, no fence.
"""

from __future__ import annotations

import argparse
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from isthmus_kvrelay.bench.pair import arguments_of, serve_source, serve_target, source_pool, target_pool
from isthmus_kvrelay.bench.workloads import WORKLOADS, Workload
from isthmus_kvrelay.transports.tuning import UNPACED

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
    ((here, there, whole),) = workload.scattered()
    size = whole // streams
    return [(here + start * size, there + start * size, size) for start in range(streams)]


def move(buffers: list[memoryview], call: Any) -> bool:
    """Drive `call` (a `sendmsg` or a receive) over all buffers. False when the other end has closed."""
    first = 0
    while first < len(buffers):
        batch: list[memoryview] = []
        size = 0
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
    def __init__(self, port: int, streams: int, *, unpaced: bool) -> None:
        self.pool = source_pool()
        self._ends = []
        for stream in range(streams):
            sock = socket.create_connection(("127.0.0.1", port))
            _options(sock, unpaced)
            self._ends.append((sock, shares(self.pool, 0, stream, streams)))
        self._threads = ThreadPoolExecutor(streams)

    def transfer(self, workload: Workload) -> None:
        number = NAMES.index(workload.name)
        if len(self._ends) == 1:
            self._one(self._ends[0], number)
        else:
            list(self._threads.map(self._one, self._ends, [number] * len(self._ends)))

    def _one(self, end: tuple[socket.socket, list[list[memoryview]]], number: int) -> None:
        sock, workloads = end
        sock.sendall(bytes([number]))
        move(workloads[number], sock.sendmsg)
        assert sock.recv(1) == b"."


class Target:
    def __init__(self, streams: int, *, unpaced: bool) -> None:
        self.pool = target_pool()
        self._unpaced = unpaced
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._streams = streams
        self.told = {"port": self._listener.getsockname()[1]}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for stream in range(self._streams):
            sock, _ = self._listener.accept()
            _options(sock, self._unpaced)
            workloads = shares(self.pool, 1, stream, self._streams)
            threading.Thread(target=self._receive, args=(sock, workloads), daemon=True).start()

    def _receive(self, sock: socket.socket, workloads: list[list[memoryview]]) -> None:
        while number := sock.recv(1):
            move(workloads[number[0]], lambda buffers: sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0])
            sock.sendall(b".")


def _options(sock: socket.socket, unpaced: bool) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if unpaced:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--unpaced", action="store_true")


def main() -> None:
    arguments, peer = arguments_of(_arguments)
    if peer is None:
        serve_target(arguments.fd, Target(arguments.streams, unpaced=arguments.unpaced))
    else:
        serve_source(arguments.fd, Source(peer["port"], arguments.streams, unpaced=arguments.unpaced))


if __name__ == "__main__":
    main()
