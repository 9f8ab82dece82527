"""What was predicted beside what happened, as metrics and for `isthmus status`."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus_planner.desk import Desk
from isthmus_shared.messages.health import Foreseen, WorkerForecast, WorkerHeartbeat
from isthmus_shared.metrics import Metrics

LATENCIES = ("ttft", "itl")
ROUNDS = 20
"""Calls until every worker was shown: medians cost some 50 µs each, and routes wait meanwhile."""


def forecasts(desk: Desk, workers: Sequence[WorkerHeartbeat]) -> tuple[WorkerForecast, ...]:
    return tuple(_of_worker(desk, beat) for beat in workers)


def _of_worker(desk: Desk, beat: WorkerHeartbeat) -> WorkerForecast:
    life = beat.incarnation
    ttft, itl = desk.accuracy.of_worker(life)
    return WorkerForecast(
        worker_id=beat.worker_id,
        incarnation=life,
        drifting=desk.drift.is_drifting(life),
        slowdown=desk.drift.slowdown(life),
        ttft=ttft,
        itl=itl,
    )


class ForecastMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._round = 0
        self._shown: set[str] = set()
        self._lines: set[str] = set()

    def show(self, desk: Desk, workers: Sequence[WorkerHeartbeat]) -> None:
        """A part of the workers, in turn; what was told of those that are gone is taken back."""
        self._round = (self._round + 1) % ROUNDS
        if self._round == 0:
            self._show_models(desk)
        for beat in workers[self._round :: ROUNDS]:
            self._show_worker(_of_worker(desk, beat))
        for name in self._shown - {beat.worker_id for beat in workers}:
            self._take_back(name)
        waiting = desk.admission.waiting
        for model in self._lines | set(waiting):
            self._metrics.admission_waiting.labels(model).set(waiting.get(model, 0))
        self._lines |= set(waiting)

    def _show_models(self, desk: Desk) -> None:
        for model in desk.accuracy.models:
            for latency, seen in zip(LATENCIES, desk.accuracy.of_model(model), strict=True):
                if seen is not None:
                    self._metrics.prediction_ratio.labels(model, latency).set(_ratio(seen))
                    self._metrics.prediction_error.labels(model, latency).set(seen.error)

    def _show_worker(self, forecast: WorkerForecast) -> None:
        metrics, name = self._metrics, forecast.worker_id
        self._shown.add(name)
        metrics.worker_slowdown.labels(name).set(forecast.slowdown)
        metrics.worker_drifting.labels(name).set(float(forecast.drifting))
        for latency, seen in zip(LATENCIES, (forecast.ttft, forecast.itl), strict=True):
            if seen is not None:
                metrics.worker_prediction_ratio.labels(name, latency).set(_ratio(seen))
                metrics.worker_prediction_error.labels(name, latency).set(seen.error)

    def _take_back(self, worker: str) -> None:
        self._shown.discard(worker)
        metrics = self._metrics
        for gauge in (metrics.worker_slowdown, metrics.worker_drifting):
            gauge.remove(worker)
        for gauge in (metrics.worker_prediction_ratio, metrics.worker_prediction_error):
            for latency in LATENCIES:
                gauge.labels(worker, latency)  # it may never have had one, and what is not there cannot be removed
                gauge.remove(worker, latency)


def _ratio(seen: Foreseen) -> float:
    return seen.predicted_p50_s / seen.actual_p50_s if seen.actual_p50_s > 0 else 0.0
