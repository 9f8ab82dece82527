"""Several vLLM engines in one process, and engines used again, for the engines' contract. A product has one each.

vLLM keeps one KV connector for the whole process; here each engine's own is put in its place for each of its turns.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import prometheus_client

from isthmus_shared.engines.config import EngineConfig
from isthmus_shared.engines.vllm.core import VllmCore
from isthmus_shared.engines.vllm.turns import CoreInfo, NewRequest, Turn


class CorePool:
    """Built engines by their configuration. One that was closed with nothing in it is given out again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[str, list[PooledCore]] = {}
        self._all: list[PooledCore] = []
        """One that nobody held would take down what vLLM has once for all of them."""

    def build(self, config: EngineConfig) -> VllmCore:
        key = config.model_dump_json()
        with self._lock:
            if self._idle.get(key):
                return self._idle[key].pop()  # type: ignore[return-value]
            _forget_metrics()
            made = PooledCore(VllmCore.build(config), self._lock, self._idle.setdefault(key, []))
            self._all.append(made)
            return made  # type: ignore[return-value]


class PooledCore:
    """A `VllmCore` by its methods."""

    def __init__(self, core: VllmCore, lock: threading.Lock, idle: list[PooledCore]) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state

        self._core, self._lock, self._idle = core, lock, idle
        self._state: Any = kv_transfer_state
        self._connector = self._state._KV_CONNECTOR_AGENT
        self._state._KV_CONNECTOR_AGENT = None
        self._last: Turn | None = None

    @property
    def info(self) -> CoreInfo:
        return self._core.info

    @property
    def flows(self) -> Any:
        return self._core.flows

    def turn(self, new: Sequence[NewRequest], aborted: Sequence[str]) -> Turn:
        with self._lock:
            self._state._KV_CONNECTOR_AGENT = self._connector
            try:
                self._last = self._core.turn(new, aborted)
            finally:
                self._state._KV_CONNECTOR_AGENT = None
            return self._last

    def close(self) -> None:
        with self._lock:
            if self._last is None or self._last.idle:
                self._idle.append(self)


def _forget_metrics() -> None:
    """vLLM forgets an older engine's metrics by itself, but not its connector's."""
    registry: Any = prometheus_client.REGISTRY
    for collector, names in list(registry._collector_to_names.items()):
        if any(name.startswith("isthmus_") for name in names):
            registry.unregister(collector)
