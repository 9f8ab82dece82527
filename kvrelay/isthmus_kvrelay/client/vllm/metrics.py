"""The connector's figures in vLLM's log and on its /metrics. Imported by the shell only: it needs vLLM."""

from __future__ import annotations

from typing import Any, cast

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from isthmus_kvrelay.client.vllm.stats import Report, empty_report, merged, summary

LOAD_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
HOOK_BUCKETS_US = (10, 20, 50, 100, 150, 200, 300, 500, 1000, 2000, 5000, 10000)


class ConnectorStats(KVConnectorStats):
    """`data` is a `Report`."""

    def reset(self) -> None:
        self.data = dict(empty_report())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return ConnectorStats(data=dict(merged(self._report, cast(Report, other.data))))

    def reduce(self) -> dict[str, int | float]:
        return summary(self._report)

    def is_empty(self) -> bool:
        return not any(self.data.values())

    @property
    def _report(self) -> Report:
        return cast(Report, self.data)


class ConnectorMetrics(KVConnectorPromMetrics):
    def __init__(
        self, vllm_config: Any, metric_types: dict[Any, Any], labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            "saved": self._counter("isthmus_kv_saved", "Prefills whose KV was staged and sealed"),
            "saved_bytes": self._counter("isthmus_kv_saved_bytes", "Bytes of KV staged and sealed"),
            "saves_failed": self._counter("isthmus_kv_saves_failed", "Prefills whose KV was not handed over"),
            "loaded": self._counter("isthmus_kv_loaded", "Requests whose KV was loaded"),
            "loaded_bytes": self._counter("isthmus_kv_loaded_bytes", "Bytes of KV loaded"),
            "loads_failed": self._counter("isthmus_kv_loads_failed", "Requests whose KV could not be loaded"),
        }
        self._histograms = {
            "load_s": self._histogram("isthmus_kv_load_seconds", "From request to loaded KV", LOAD_BUCKETS_S),
            "worker_hook_us": self._histogram(
                "isthmus_kv_worker_hook_us", "Microseconds that one step spends in a worker's hooks", HOOK_BUCKETS_US
            ),
            "scheduler_hook_us": self._histogram(
                "isthmus_kv_scheduler_hook_us", "Microseconds that one step spends in the scheduler's", HOOK_BUCKETS_US
            ),
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counters in self._counters.items():
            counters[engine_idx].inc(transfer_stats_data[name])
        for name, histograms in self._histograms.items():
            for value in transfer_stats_data[name]:
                histograms[engine_idx].observe(value)

    def _counter(self, name: str, text: str) -> dict[int, Counter]:
        metric = self._counter_cls(name=name, documentation=text, labelnames=self._labelnames)
        return self._per_engine(metric)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> dict[int, Histogram]:
        metric = self._histogram_cls(name=name, documentation=text, buckets=buckets, labelnames=self._labelnames)
        return self._per_engine(metric)

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}
