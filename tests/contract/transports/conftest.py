"""The ways between a producer and a consumer: two relays over TCP or RDMA verbs, or one relay (shared memory)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isthmus_kvrelay.client import RelayClient
from isthmus_kvrelay.transports.verbs.binding import BINDINGS, load_binding
from isthmus_kvrelay.transports.verbs.transport import VerbsSettings
from isthmus_testing import eventually
from isthmus_testing.rdma import DEVICES, linked_devices
from isthmus_testing.relay import Node, client_of, daemon_settings, running


@dataclass
class Way:
    """Nodes at both ends, and a client at each."""

    source: Node
    target: Node
    producer: RelayClient
    consumer: RelayClient

    async def at_rest(self) -> None:
        """Nothing is held anywhere, and both cores say that they are consistent."""
        await eventually(lambda: self.source.at_rest() and self.target.at_rest(), what="relays at rest")
        self.source.daemon.check_invariants()
        self.target.daemon.check_invariants()


MakeWay = Callable[..., AbstractAsyncContextManager[Way]]


OVER_VERBS = [f"verbs-{name}" for name in BINDINGS] if DEVICES in os.environ else []
"""Where there are linked devices only: `make rdma-test`. Elsewhere tests/rdma says loudly what is missing."""


@pytest.fixture(params=["tcp", "shm", *OVER_VERBS])
def make_way(request: pytest.FixtureRequest, tmp_path: Path) -> MakeWay:
    kind, _, binding = str(request.param).partition("-")
    ends: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    if kind == "verbs":
        for name, device in zip(ends, linked_devices(binding)[:2], strict=True):
            ends[name] = {"verbs": VerbsSettings(devices=(device,)), "load": partial(load_binding, (binding,))}

    @contextlib.asynccontextmanager
    async def make(**options: Any) -> AsyncIterator[Way]:
        async with contextlib.AsyncExitStack() as stack:
            source = target = await stack.enter_async_context(
                running(daemon_settings(tmp_path, "a", **ends["a"], **options))
            )
            if kind != "shm":
                target = await stack.enter_async_context(
                    running(daemon_settings(tmp_path, "b", **ends["b"], **options))
                )
            producer = await stack.enter_async_context(client_of(source, "producer"))
            consumer = await stack.enter_async_context(client_of(target, "consumer"))
            yield Way(source, target, producer, consumer)

    return make
