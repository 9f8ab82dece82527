"""Every metric of the product, by name, in one place. One `Metrics` with its own registry per process.

Names follow Prometheus: base units, `_total` on counters. Labels have few values each: never an id or a subject.
What vLLM measures too has vLLM's name and meaning after `isthmus_`, so that its dashboards need one word replaced.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS_CONTENT_TYPE

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
__all__ = ["CONTENT_TYPE", "OPENMETRICS_CONTENT_TYPE", "Metrics"]

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60)
ITL_BUCKETS_S = (0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
CALL_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
TOKEN_BUCKETS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
ITL_CAUSES = ("handover", "transfer", "headroom", "batch", "step", "host", "bus", "unknown")
RECOVERIES = ("resumed", "moved", "stayed")
FINISHED_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """All instruments of a process; those of another service's kind stay at zero and cost nothing."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._others: list[CollectorRegistry] = []
        self._bus()
        self._requests()
        self._planner()
        self._worker()
        self._relay()

    def exposition(self) -> bytes:
        return b"".join(generate_latest(registry) for registry in (self.registry, *self._others))

    def include(self, registry: CollectorRegistry) -> None:
        """Show another registry's metrics after our own: an engine's, under its own names."""
        self._others.append(registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"isthmus_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"isthmus_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"isthmus_{name}", text, labels, registry=self.registry, buckets=buckets)

    def _bus(self) -> None:
        self.process_info = self._gauge("process_info", "1; labels say who", "service", "instance", "incarnation")
        self.process_state = self._gauge("process_state", "1 for the state it is in", "state")
        self.bus_connected = self._gauge("bus_connected", "1 while the bus is within reach")
        self.bus_calls = self._counter("bus_calls_total", "Requests served on the bus", "endpoint", "outcome")
        self.bus_call_seconds = self._histogram(
            "bus_call_seconds", "From receipt of a bus request to its answer", CALL_BUCKETS_S, "endpoint"
        )
        self.bus_malformed = self._counter("bus_malformed_total", "Messages that made no sense", "endpoint")
        self.bus_dropped = self._gauge("bus_dropped", "Messages shed because too many waited", "endpoint")
        self.heartbeats = self._counter("heartbeats_total", "Heartbeats published")

    def _requests(self) -> None:
        self.requests = self._counter("requests_total", "Client requests ended", "endpoint", "outcome")
        """outcome: `ok`, or the error's code."""
        self.requests_in_flight = self._gauge("requests_in_flight", "Client requests in progress at this ingress")
        self.time_to_first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From receipt to the first token", TTFT_BUCKETS_S
        )
        self.request_predicted_ttft_seconds = self._histogram(
            "request_predicted_ttft_seconds",
            "Predicted p50 of TTFT when it was routed, for requests that had a first token",
            TTFT_BUCKETS_S,
        )
        self.inter_token_latency_seconds = self._histogram(
            "inter_token_latency_seconds", "Between two tokens", ITL_BUCKETS_S
        )
        self.itl_excursions = self._counter("itl_excursions_total", "Tokens that came late", "cause")
        """cause: one of `ITL_CAUSES` (docs/tracing.md)."""
        for cause in ITL_CAUSES:
            self.itl_excursions.labels(cause)
        self.request_time_per_output_token_seconds = self._histogram(
            "request_time_per_output_token_seconds", "Mean of a choice's inter-token latencies", ITL_BUCKETS_S
        )
        self.e2e_request_latency_seconds = self._histogram(
            "e2e_request_latency_seconds", "From receipt to the end", E2E_BUCKETS_S
        )
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt length", TOKEN_BUCKETS)
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Length of a choice's output", TOKEN_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens accepted")
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens sent to clients")
        self.request_success = self._counter("request_success_total", "Choices ended", "finished_reason")
        """finished_reason, in vLLM's words: one of `FINISHED_REASONS`."""
        for reason in FINISHED_REASONS:
            self.request_success.labels(reason)
        self.requests_rejected = self._counter("requests_rejected_total", "Refused before any work", "code")
        self.tenant_requests = self._counter("tenant_requests_total", "Client requests ended", "tenant", "outcome")
        self.tenant_prompt_tokens = self._counter("tenant_prompt_tokens_total", "Prompt tokens accepted", "tenant")
        self.tenant_generation_tokens = self._counter(
            "tenant_generation_tokens_total", "Tokens generated for its requests", "tenant"
        )
        """tenant: a name of the operator's own file of tenants, never a key or anything that a client chooses."""
        self.replans = self._counter("replans_total", "Attempts beyond a request's first", "code")
        self.recoveries = self._counter("recoveries_total", "Sequences that went on elsewhere, or should have", "what")
        """what: resumed (from staged KV, without a second prefill), moved, stayed (a move that did not come about)."""
        for what in RECOVERIES:
            self.recoveries.labels(what)
        self.cancellations = self._counter("cancellations_total", "Requests ended by the client's leaving")

    def _planner(self) -> None:
        self.routes_by_last_plan = self._counter(
            "routes_by_last_plan_total", "Routes that the ingress took from the last plan, since no planner answered"
        )
        self.routes = self._counter("routes_total", "Routes given or refused", "mode", "outcome")
        self.route_predicted_ttft_seconds = self._histogram(
            "route_predicted_ttft_seconds", "Predicted p50 of TTFT", TTFT_BUCKETS_S
        )
        self.planner_prefix_hashes = self._gauge(
            "planner_prefix_hashes", "Prefixes of 64 tokens that this planner knows to be cached, over all workers"
        )
        self.admission_waiting = self._gauge("admission_waiting", "Requests in line at this planner", "model")
        self.prediction_ratio = self._gauge(
            "prediction_ratio", "Predicted over actual, of medians of the latest requests", "model", "latency"
        )
        self.prediction_error = self._gauge(
            "prediction_error", "Median of |predicted / actual - 1| of the latest requests", "model", "latency"
        )
        self.worker_prediction_ratio = self._gauge(
            "worker_prediction_ratio", "Predicted over actual, of one worker's latest requests", "worker", "latency"
        )
        self.worker_prediction_error = self._gauge(
            "worker_prediction_error", "The same as prediction_error, of one worker", "worker", "latency"
        )
        self.worker_slowdown = self._gauge(
            "worker_slowdown", "Time of a worker's steps over what they usually take", "worker"
        )
        self.worker_drifting = self._gauge(
            "worker_drifting", "1 while a worker's steps take a fifth longer than usual", "worker"
        )
        self.workers = self._gauge("workers", "Workers known", "role", "state")
        self.workers_lost = self._counter("workers_lost_total", "Workers taken for dead", "cause")
        self.role_changes = self._counter("role_changes_total", "Changes of workers' roles", "model", "to", "outcome")
        self.model_changes = self._counter("model_changes_total", "Workers that were to load a model", "to", "outcome")

    def _worker(self) -> None:
        self.engine_steps = self._counter("engine_steps_total", "Engine steps", "phase")
        self.engine_step_seconds = self._histogram("engine_step_seconds", "One step", ITL_BUCKETS_S, "phase")
        self.engine_tokens = self._counter("engine_tokens_total", "Tokens computed", "phase")
        self.num_requests_running = self._gauge("num_requests_running", "Sequences in this engine's batch")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Sequences that this engine holds back")
        self.num_requests_waiting_by_reason = self._gauge(
            "num_requests_waiting_by_reason", "Of those: for room in the batch, or for their KV to arrive", "reason"
        )
        """reason, in vLLM's words: `capacity` or `deferred` (its KV or its first token has not come yet)."""
        self.engine_kv_blocks = self._gauge("engine_kv_blocks", "KV blocks of this engine")
        self.kv_cache_usage_perc = self._gauge("kv_cache_usage_perc", "Share of those in use, 0 to 1")
        self.prefix_cache_queries = self._counter(
            "prefix_cache_queries_total", "Prompt tokens that were looked for in the prefix cache"
        )
        self.prefix_cache_hits = self._counter("prefix_cache_hits_total", "Of those: found, and not computed again")
        self.worker_finishes = self._counter("worker_finishes_total", "Sequences ended", "phase", "reason")
        self.worker_kv_out_bytes = self._counter("worker_kv_out_bytes_total", "KV staged for others")
        self.worker_kv_in_bytes = self._counter("worker_kv_in_bytes_total", "KV loaded from others")
        self.worker_transfer_seconds = self._histogram(
            "worker_transfer_seconds", "From submit to committed KV", E2E_BUCKETS_S
        )
        self.worker_transfers_failed = self._counter("worker_transfers_failed_total", "Transfers failed", "code")

    def _relay(self) -> None:
        self.relay_pool_bytes = self._gauge("relay_pool_bytes", "Staging pool")
        self.relay_pool_free_bytes = self._gauge("relay_pool_free_bytes", "Staging pool, free")
        self.relay_slots_quarantined = self._gauge("relay_slots_quarantined", "Slots waiting for a quiet sender")
        self.relay_quarantines = self._counter("relay_quarantines_total", "Slots put into quarantine")
        self.relay_sent_bytes = self._counter("relay_sent_bytes_total", "KV bytes sent", "transport")
        self.relay_received_bytes = self._counter("relay_received_bytes_total", "KV bytes received", "transport")
        self.relay_flows = self._gauge("relay_flows", "Flows open", "direction")
        self.relay_flows_ended = self._counter("relay_flows_ended_total", "Flows ended", "direction", "cause")
        """cause: `done`, or why it failed: one each, never summed into one."""
        self.relay_credits_granted_bytes = self._counter("relay_credits_granted_bytes_total", "Credit given to peers")
        self.relay_credits_outstanding_bytes = self._gauge("relay_credits_outstanding_bytes", "Credit not yet used")
        self.relay_checksum_failures = self._counter("relay_checksum_failures_total", "Chunks that did not verify")
        self.relay_stale = self._counter("relay_stale_total", "Frames of an old life or generation", "what")
        self.relay_lanes = self._gauge("relay_lanes", "Lanes to peers", "state")
        self.relay_clients = self._gauge("relay_clients", "Workers attached")
        self.relay_slots_retained = self._gauge("relay_slots_retained", "Slots that flows which are over still keep")
        self.relay_retargets = self._counter("relay_retargets_total", "Flows fetched again by another destination")
        self.relay_revivals = self._counter("relay_revivals_total", "Of those: served from a retained flow")
        self.relay_rate_decreases = self._counter("relay_rate_decreases_total", "Lanes slowed down after feedback")
        self.relay_credits = self._gauge("relay_credits", "Credit, sums since the start", "kind", "account")
        """account: `granted`, `consumed`, `returned`; in flight is what is left of the first."""
        self.relay_queue_seconds = self._histogram(
            "relay_queue_seconds", "One chunk, from filled and credited to handed to its lane", CALL_BUCKETS_S
        )
        self.relay_chunk_seconds = self._histogram(
            "relay_chunk_seconds", "One chunk, from its credit to landed and verified", CALL_BUCKETS_S
        )
        self._relay_lanes()

    def _relay_lanes(self) -> None:
        """Labelled with the peer's incarnation; a lane's series go when it does, so there are as many as lanes."""
        self.relay_lane_rate = self._gauge("relay_lane_rate_bytes_per_second", "What the pacer allows", "peer")
        self.relay_lane_queue_age = self._gauge(
            "relay_lane_queue_age_seconds", "Since when chunks have been waiting", "peer"
        )
        self.relay_lane_waiting = self._gauge("relay_lane_waiting_flows", "Flows with chunks to send", "peer")
        self.relay_lane_work = self._gauge("relay_lane_work_requests", "Chunks of credit that the peer holds", "peer")
        self.relay_lane_sent = self._gauge("relay_lane_sent_bytes", "Sent since the lane came up", "peer")
        self.relay_lane_received = self._gauge("relay_lane_received_bytes", "Received since then", "peer")
        self.relay_lane_damaged = self._gauge("relay_lane_checksum_failures", "Chunks that did not verify", "peer")
