"""Real relay processes on a real bus."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from isthmus_kvrelay.client import RelayClient
from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.bus.port import Subscription
from isthmus_shared.bus.server import EmbeddedNats
from isthmus_shared.ids import NodeId, WorkerId, new_incarnation
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import RelayHeartbeat, WorkerLost
from isthmus_shared.messages.work import WorkerRef
from isthmus_testing import eventually

SECRET = "a secret only for tests"
SLOT_BYTES, SLOTS = 4096, 64
START_S = 30.0


@dataclass
class Watch:
    """What relays say on the bus."""

    beats: dict[str, RelayHeartbeat] = field(default_factory=dict)
    losses: list[WorkerLost] = field(default_factory=list)

    def received_bytes(self, node: str) -> int:
        return self.beats[node].received_bytes if node in self.beats else 0

    def clients(self, node: str) -> set[str]:
        return {client.worker_id for client in self.beats[node].clients} if node in self.beats else set()

    def at_rest(self, node: str) -> bool:
        beat = self.beats.get(node)
        return (
            beat is not None
            and beat.pool_free_bytes == beat.pool_bytes
            and not beat.flows_in
            and not beat.flows_out
            and not beat.credits_outstanding_bytes
        )


@dataclass
class RelayProcess:
    node: str
    socket: Path
    process: asyncio.subprocess.Process
    log: Path

    async def connect(self, name: str = "worker") -> RelayClient:
        worker = WorkerRef(worker_id=WorkerId(name), incarnation=new_incarnation(), node_id=NodeId(self.node))
        return await RelayClient.connect(str(self.socket), worker=worker, timeout_s=10)

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        async with asyncio.timeout(30):
            return await self.process.wait()


StartRelay = Callable[[str], AbstractAsyncContextManager[RelayProcess]]


def python_path() -> str:
    return os.pathsep.join(path for path in sys.path if path)


@pytest.fixture
def start_relay(tmp_path: Path, nats_server: EmbeddedNats) -> StartRelay:
    @contextlib.asynccontextmanager
    async def start(node: str) -> AsyncIterator[RelayProcess]:
        socket, log = tmp_path / f"{node}.sock", tmp_path / f"{node}-{new_incarnation()}.log"
        env = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": python_path(),
            "ISTHMUS_NATS_URL": nats_server.url,
            "ISTHMUS_HEARTBEAT_INTERVAL_S": "0.1",
            "ISTHMUS_SHUTDOWN_GRACE_S": "10",
            "ISTHMUS_RELAY_NODE_ID": node,
            "ISTHMUS_RELAY_SOCKET": str(socket),
            "ISTHMUS_RELAY_SECRET": SECRET,
            "ISTHMUS_RELAY_POOL_BYTES": str(SLOTS * SLOT_BYTES),
            "ISTHMUS_RELAY_SLOT_BYTES": str(SLOT_BYTES),
            "ISTHMUS_RELAY_RETARGET_WAIT_S": "1",
            "ISTHMUS_RELAY_COMPILED": "false",  # half a second of CPU for each relay, for a few KiB
        }
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "isthmus_kvrelay.daemon", env=env, stderr=stderr, stdin=asyncio.subprocess.DEVNULL
            )
        try:
            await eventually(lambda: "relay.ready" in log.read_text(), START_S, what=f"relay {node} ready")
            yield RelayProcess(node, socket, process, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    return start


@pytest.fixture
async def watch(nats_server: EmbeddedNats) -> AsyncIterator[Watch]:
    seen = Watch()

    async def beats(subscription: Subscription) -> None:
        async for message in subscription:
            beat = RelayHeartbeat.decode(message.data)
            seen.beats[beat.relay.node_id] = beat

    async def losses(subscription: Subscription) -> None:
        async for message in subscription:
            seen.losses.append(WorkerLost.decode(message.data))

    async with (
        await NatsBus.connect(nats_server.url, name="watch") as bus,
        bus.subscribe(subjects.HEARTBEAT_RELAY) as one,
        bus.subscribe(subjects.WORKER_LOST) as two,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(beats(one)), group.create_task(losses(two))]
        yield seen
        for task in tasks:
            task.cancel()
