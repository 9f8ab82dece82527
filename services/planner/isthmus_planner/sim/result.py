"""What a simulation says. Latencies in seconds; quantiles from histograms whose bins are 0.4 % wide."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Quantiles:
    """All 0 when `count` is."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class Waits:
    """Where a request's time goes, on average; together its end-to-end latency."""

    overhead_s: float
    prefill_queue_s: float
    prefill_s: float
    kv_room_s: float
    """For the decode node's memory."""
    transfer_s: float
    """For its lane, and on it."""
    seat_s: float
    """From landing until it is in the batch."""
    decode_s: float


@dataclass(frozen=True, slots=True)
class StreamResult:
    name: str
    sent: int
    completed: int
    refused: int
    """Admission: the queue limit was reached, or no node has room for a request of that length."""
    measured: int
    """Completed, without the warm-up."""
    ttft_s: Quantiles
    itl_s: Quantiles
    """Of single tokens; the first gap of a request holds its transfer."""
    tpot_s: Quantiles
    """Of requests: (end-to-end latency - TTFT) / (output tokens - 1)."""
    e2el_s: Quantiles
    requests_per_s: float
    """These three over the time from the first to the last completion that counts, the drain at the end included."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Input and output."""
    steady_requests_per_s: float
    """These three until the last request was sent, without the drain."""
    steady_output_tokens_per_s: float
    steady_total_tokens_per_s: float
    waits: Waits


@dataclass(frozen=True, slots=True)
class NodeResult:
    name: str
    role: str
    """At the end."""
    prefill_busy: float
    """Part of the time in which it computes prompts (alone or beside decode)."""
    decode_busy: float
    mean_batch: float
    """Over the time in which it decodes."""
    mean_step_s: float
    kv_peak_tokens: int
    kv_mean_share: float
    staging_peak_tokens: int
    prefilled_requests: int
    prefilled_tokens: int
    decoded_tokens: int
    sent_bytes: float
    received_bytes: float
    nic_overflows: int
    prefix_hit_share: float
    """Of the prompt tokens that reached it."""


@dataclass(frozen=True, slots=True)
class Result:
    duration_s: float
    """Of simulated time."""
    events: int
    streams: tuple[StreamResult, ...]
    nodes: tuple[NodeResult, ...]
    bottleneck: str
    """`prefill`, `kv_memory`, `transfer`, `decode_seats` where requests queue; else `prefill_time` or `decode_time`."""

    @property
    def stream(self) -> StreamResult:
        """The only one."""
        assert len(self.streams) == 1
        return self.streams[0]

    def to_json(self) -> bytes:
        """The same bytes for the same scenario, on any machine."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"
