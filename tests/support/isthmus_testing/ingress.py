"""The real ingress in this process, for tests that speak to it over HTTP or the bus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from isthmus_ingress.config import IngressConfig
from isthmus_ingress.service import Ingress
from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.bus.port import Bus
from isthmus_shared.engines.reference.checkpoint import CHAT_TEMPLATE, SPECIAL_TOKENS, byte_tokenizer
from isthmus_shared.service import ServiceRuntime
from isthmus_testing.fake_cluster import FakeCluster, say
from isthmus_testing.waiting import eventually


def write_text_folder(folder: Path) -> Path:
    """A byte-level tokenizer and a chat template, without any weights."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[1], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@asynccontextmanager
async def running_ingress(
    bus: Bus, folder: Path, *, serve_http: bool = True, wait_for_model: bool = True, **settings: Any
) -> AsyncIterator[Ingress]:
    """Listening, and with a model to serve; it has drained when the context is left."""
    config = IngressConfig(model=folder, port=0, **settings)
    runtime = ServiceRuntime("ingress", config, bus=bus, instance="test", serve_http=False)
    async with runtime, asyncio.TaskGroup() as tasks:
        ingress = Ingress(runtime, serve_http=serve_http)
        tasks.create_task(ingress.run())
        async with asyncio.timeout(10):
            await ingress.listening.wait()
        if wait_for_model:
            await eventually(lambda: bool(ingress.roster.models), what="a worker's heartbeat")
        try:
            yield ingress
        finally:
            runtime.stopping.set()


@asynccontextmanager
async def ingress_stack(
    folder: Path, script: str, *, settings: dict[str, Any] | None = None, serve_http: bool = True, **cluster: Any
) -> AsyncIterator[tuple[Ingress, FakeCluster, MemoryBroker]]:
    """A scripted cluster and an ingress before it, over one in-memory bus. At the end nobody may hold anything."""
    broker = MemoryBroker()
    fake = FakeCluster(broker.client("cluster"), script=cluster.pop("tokens", say(script)), **cluster)
    bus = broker.client("ingress")
    options = {"serve_http": serve_http, "wait_for_model": False, **(settings or {})}
    async with fake.running(), running_ingress(bus, folder, **options) as ingress:
        await fake.beat()
        await eventually(lambda: bool(ingress.roster.models), what="the workers' heartbeats")
        yield ingress, fake, broker
    assert fake.held == {}
