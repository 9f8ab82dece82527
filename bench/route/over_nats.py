"""A planner process behind a real nats-server, and clients that ask it as fast as it answers.

The clients speak NATS' protocol themselves, and in few bytes: on two cores a full client would take more of the
machine than the planner. They are one process of their own (`python bench/route/over_nats.py URL …`), as are planner
and server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from workers import relay, request, worker

from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.bus.server import EmbeddedNats
from isthmus_shared.errors import IsthmusError
from isthmus_shared.messages import subjects
from isthmus_shared.messages.route import RouteReply

BEAT_S = 0.5
WARM_S = 1.0
START_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class OverNats:
    workers: int
    clients: int
    under_way: int
    routes_per_s: float
    cpu_us_per_route: float
    cpu_share: float
    p50_ms: float
    p99_ms: float
    refused: int

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


async def over_nats(workers: int, clients: int, under_way: int, seconds: float) -> OverNats:
    async with EmbeddedNats() as server:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ISTHMUS_")}
        environ |= {"ISTHMUS_NATS_URL": server.url, "ISTHMUS_LOG_LEVEL": "warning"}
        planner = await asyncio.create_subprocess_exec(sys.executable, "-m", "isthmus_planner", env=environ)
        try:
            async with await NatsBus.connect(server.url, name="bench") as bus, asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(_beat(bus, workers))
                await _until_routed(bus)
                found = await _measured(server.url, planner.pid, workers, clients, under_way, seconds)
                beating.cancel()
                return found
        finally:
            planner.terminate()
            await planner.wait()


async def _beat(bus: NatsBus, workers: int) -> None:
    """All workers and relays, spread over the interval as they are in a real cluster."""
    rng, told = random.Random(1), 8
    while True:
        for index in range(workers):
            await bus.publish(subjects.HEARTBEAT_WORKER, worker(index, rng, told).encode())
            await bus.publish(subjects.HEARTBEAT_RELAY, relay(index, 1_000_000 * told).encode())
            await asyncio.sleep(BEAT_S / workers)
        told += 8


async def _until_routed(bus: NatsBus) -> None:
    rng = random.Random(2)
    async with asyncio.timeout(START_S):
        while True:
            try:
                answer = await bus.request(subjects.ROUTE, request(0, rng, targets=False).encode(), timeout_s=1.0)
                if RouteReply.decode(answer.data).route is not None:
                    break
            except IsthmusError:
                pass
            await asyncio.sleep(0.1)
    await asyncio.sleep(2 * BEAT_S)


async def _measured(url: str, planner: int, workers: int, clients: int, under_way: int, seconds: float) -> OverNats:
    asking = await asyncio.create_subprocess_exec(
        sys.executable, __file__, url, str(clients), str(under_way), str(seconds), stdout=asyncio.subprocess.PIPE
    )
    assert asking.stdout is not None
    await asking.stdout.readline()  # it is warm: from here on it counts
    cpu_s, wall_s = _cpu_s(planner), time.perf_counter()
    told = json.loads(await asking.stdout.readline())
    cpu_s, wall_s = _cpu_s(planner) - cpu_s, time.perf_counter() - wall_s
    await asking.wait()
    return OverNats(
        workers=workers,
        clients=clients,
        under_way=clients * under_way,
        routes_per_s=told["routes"] / told["took_s"],
        cpu_us_per_route=1e6 * cpu_s / max(1, told["routes"]),
        cpu_share=cpu_s / wall_s,
        p50_ms=told["p50_ms"],
        p99_ms=told["p99_ms"],
        refused=told["refused"],
    )


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Asking(asyncio.Protocol):
    """One client: `under_way` questions, and the next one for each answer."""

    def __init__(self, number: int, under_way: int, payloads: list[bytes]) -> None:
        self._under_way, self._payloads = under_way, payloads
        self._inbox = f"_INBOX.bench{number}"
        self._asked: dict[bytes, float] = {}
        self._rest = b""
        self._sent = 0
        self.took_s: list[float] = []
        self.refused = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(b'CONNECT {"verbose":false}\r\nSUB %s.* 1\r\n' % self._inbox.encode())
        transport.write(b"".join(self._question() for _ in range(self._under_way)))

    def data_received(self, data: bytes) -> None:
        data, at, out = self._rest + data, 0, []
        now_s = time.perf_counter()
        while (end := data.find(b"\r\n", at)) >= 0:
            line = data[at:end]
            if not line.startswith(b"MSG "):
                if line == b"PING":
                    out.append(b"PONG\r\n")
                at = end + 2
                continue
            size = int(line.rpartition(b" ")[2])
            if len(data) < end + 4 + size:
                break
            self.took_s.append(now_s - self._asked.pop(line.split(b" ", 2)[1]))
            self.refused += b"\xa5fault" in data[end + 2 : end + 2 + size]
            at = end + 4 + size
            out.append(self._question())
        self._rest = data[at:]
        self._transport.write(b"".join(out))

    def _question(self) -> bytes:
        payload = self._payloads[self._sent % len(self._payloads)]
        inbox = f"{self._inbox}.{self._sent}".encode()
        self._sent += 1
        self._asked[inbox] = time.perf_counter()
        return b"PUB %s %s %d\r\n%s\r\n" % (subjects.ROUTE.encode(), inbox, len(payload), payload)


def _given(asker: Asking) -> Asking:
    return asker


async def ask(url: str, clients: int, under_way: int, seconds: float) -> None:
    """Prints a line when it is warm, and then what it found."""
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    rng = random.Random(3)
    askers: list[Asking] = []
    for number in range(clients):
        payloads = [request(1000 * number + n, rng, targets=False).encode() for n in range(1000)]
        asker = Asking(number, under_way, payloads)
        await loop.create_connection(partial(_given, asker), parts.hostname or "127.0.0.1", parts.port or 4222)
        askers.append(asker)
    await asyncio.sleep(WARM_S)
    for asker in askers:
        asker.took_s.clear()
    print("warm", flush=True)
    began_s = time.perf_counter()
    await asyncio.sleep(seconds)
    took_s = time.perf_counter() - began_s
    times = sorted(each for asker in askers for each in asker.took_s)
    told = {
        "routes": len(times),
        "took_s": took_s,
        "p50_ms": 1e3 * times[len(times) // 2],
        "p99_ms": 1e3 * times[int(0.99 * len(times))],
        "refused": sum(asker.refused for asker in askers),
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    asyncio.run(ask(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
