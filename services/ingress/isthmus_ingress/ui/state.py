"""What the operator's page shows: the planner's view, this ingress' requests, and its latencies. No text of anybody."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import Histogram

from isthmus_ingress.hub import Hub
from isthmus_shared.bus.port import Bus
from isthmus_shared.errors import IsthmusError
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import ClusterView, ViewRequest
from isthmus_shared.messages.work import WorkerRef
from isthmus_shared.metrics import Metrics

VIEW_TIMEOUT_S = 1.0
FRESH_S = 0.5
"""Any number of pages cost the planner at most one question in so long."""
MAX_REQUESTS = 200
"""Shown; the oldest first, since they are the ones to worry about."""


class UiState:
    """One per ingress."""

    def __init__(self, bus: Bus, hub: Hub, metrics: Metrics) -> None:
        self._bus, self._hub, self._metrics = bus, hub, metrics
        self._lock = asyncio.Lock()
        self._view: ClusterView | None = None
        self._asked_s: float | None = None
        self._heard_s: float | None = None
        self._problem: str | None = None

    async def snapshot(self) -> dict[str, Any]:
        """Fit for JSON. Never raises for a planner that is away: then the last view comes with its age and why."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._asked_s is None or loop.time() - self._asked_s >= FRESH_S:
                await self._ask()
        now_s = loop.time()
        return {
            "cluster": None if self._view is None else self._view.model_dump(mode="json"),
            "cluster_age_s": None if self._heard_s is None else now_s - self._heard_s,
            "problem": self._problem,
            "requests": self._requests(now_s),
            "requests_running": self._hub.running,
            "tokens_out": self._metrics.generation_tokens._value.get(),
            "latency": {
                "ttft": _buckets(self._metrics.time_to_first_token_seconds),
                "itl": _buckets(self._metrics.inter_token_latency_seconds),
                "predicted_ttft": _buckets(self._metrics.request_predicted_ttft_seconds),
            },
        }

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            reply = await self._bus.request(subjects.VIEW, ViewRequest().encode(), timeout_s=VIEW_TIMEOUT_S)
            self._view, self._problem = ClusterView.decode(reply.data), None
            self._heard_s = loop.time()
        except IsthmusError as error:
            self._problem = f"the planner does not answer: {error.what}"
        self._asked_s = loop.time()

    def _requests(self, now_s: float) -> list[dict[str, Any]]:
        oldest = sorted(self._hub.sagas, key=lambda running: running.begun_s)[:MAX_REQUESTS]
        return [
            {
                "id": running.work.request_id,
                "state": running.saga.state.value,
                "age_s": now_s - running.begun_s,
                "isl_tokens": len(running.work.prompt),
                "osl_tokens": len(running.saga.output),
                "attempts": running.saga.attempts,
                "mode": None if running.route is None else running.route.mode.value,
                "prefill": None if running.route is None else _worker(running.route.prefill),
                "decode": None if running.route is None else _worker(running.route.decode),
            }
            for running in oldest
        ]


def _worker(worker: WorkerRef | None) -> str | None:
    return None if worker is None else worker.worker_id


def _buckets(histogram: Histogram) -> dict[str, list[float]]:
    """Upper bounds (None for the last, which has none) and counts since the start, cumulative."""
    (family,) = histogram.collect()
    samples = [sample for sample in family.samples if sample.name.endswith("_bucket")]
    bounds = [None if sample.labels["le"] == "+Inf" else float(sample.labels["le"]) for sample in samples]
    return {"le": bounds, "count": [sample.value for sample in samples]}  # type: ignore[dict-item]
