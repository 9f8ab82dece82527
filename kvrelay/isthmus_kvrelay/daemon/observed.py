"""What a daemon sees of itself: the core's sums and states as metrics, and what a chunk costs this host."""

from __future__ import annotations

from collections import Counter

from isthmus_kvrelay.core.events import FlowClosed, HostCostMeasured, Side
from isthmus_kvrelay.core.relay import LaneStats, RelayStats
from isthmus_kvrelay.core.staging import SlotState
from isthmus_shared.errors import ChecksumMismatch
from isthmus_shared.metrics import Metrics

MIN_CHUNKS = 64
"""Fewer say nothing: the process also does other things."""
NEWEST_SHARE = 0.3
"""Weight of the newest measurement: three or four heartbeats make a new cost felt, one odd one does not."""


class HostCost:
    """CPU time of this process per chunk received, smoothed. What it sends meanwhile counts too: an upper bound."""

    def __init__(self) -> None:
        self._cpu_s: float | None = None
        self._chunks = 0
        self._us: float | None = None

    @property
    def us_per_chunk(self) -> float | None:
        """None until enough has been received."""
        return self._us

    def measure(self, cpu_s: float, chunks: int) -> HostCostMeasured | None:
        """`cpu_s` and `chunks` since the process began; None while there is nothing new to say."""
        if self._cpu_s is None:
            self._cpu_s, self._chunks = cpu_s, chunks
            return None
        fresh = chunks - self._chunks
        if fresh < MIN_CHUNKS:
            if not fresh:
                self._cpu_s = cpu_s  # idle: its cost is nobody's
            return None
        us = (cpu_s - self._cpu_s) / fresh * 1e6
        self._us = us if self._us is None else NEWEST_SHARE * us + (1 - NEWEST_SHARE) * self._us
        self._cpu_s, self._chunks = cpu_s, chunks
        return HostCostMeasured(max(1.0, self._us))


class Observed:
    """The core's sums and states as metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._sent_via, self._received_via = Counter[str](), Counter[str]()
        self._stale = self._uncredited = 0
        self._granted_bytes = self._quarantines = 0
        self._retargets = self._revivals = self._decreases = 0
        self._peers: set[str] = set()

    def take(self, stats: RelayStats, uncredited_chunks: int, chunk_times: tuple[list[float], list[float]]) -> None:
        m = self._metrics
        m.relay_pool_bytes.set(stats.slots_total * stats.slot_bytes)
        m.relay_pool_free_bytes.set(stats.slots_usable * stats.slot_bytes)
        m.relay_slots_quarantined.set(stats.slots[SlotState.QUARANTINED])
        m.relay_flows.labels(Side.OUT.value).set(stats.flows_out)
        m.relay_flows.labels(Side.IN.value).set(stats.flows_in)
        m.relay_credits_outstanding_bytes.set(stats.credits_outstanding_bytes)
        m.relay_lanes.labels("up").set(stats.lanes)
        m.relay_clients.set(stats.clients)
        for counter, sums, seen in (
            (m.relay_sent_bytes, stats.sent_via, self._sent_via),
            (m.relay_received_bytes, stats.received_via, self._received_via),
        ):
            for transport, size in sums.items():
                counter.labels(transport).inc(size - seen[transport])
                seen[transport] = size
        m.relay_credits_granted_bytes.inc(stats.credits_granted_bytes - self._granted_bytes)
        m.relay_quarantines.inc(stats.quarantines - self._quarantines)
        m.relay_stale.labels("message").inc(stats.stale - self._stale)
        m.relay_stale.labels("chunk").inc(uncredited_chunks - self._uncredited)
        self._granted_bytes, self._quarantines = stats.credits_granted_bytes, stats.quarantines
        self._stale, self._uncredited = stats.stale, uncredited_chunks
        self._take_times(chunk_times)
        self._take_lanes(stats.by_lane)
        self._take_pulls(stats)

    def _take_times(self, chunk_times: tuple[list[float], list[float]]) -> None:
        queued, landed = chunk_times
        for seconds in queued:
            self._metrics.relay_queue_seconds.observe(seconds)
        for seconds in landed:
            self._metrics.relay_chunk_seconds.observe(seconds)

    def _take_pulls(self, stats: RelayStats) -> None:
        m = self._metrics
        m.relay_slots_retained.set(stats.slots[SlotState.RETAINED])
        m.relay_retargets.inc(stats.retargets - self._retargets)
        m.relay_revivals.inc(stats.revivals - self._revivals)
        m.relay_rate_decreases.inc(stats.decreases - self._decreases)
        self._retargets, self._revivals, self._decreases = stats.retargets, stats.revivals, stats.decreases
        for kind, credit in stats.credits.items():
            for account in ("granted", "consumed", "returned"):
                m.relay_credits.labels(kind, account).set(getattr(credit, account))

    def _take_lanes(self, lanes: tuple[LaneStats, ...]) -> None:
        m = self._metrics
        gauges = {
            m.relay_lane_rate: "rate_bytes_per_s",
            m.relay_lane_queue_age: "queue_age_s",
            m.relay_lane_waiting: "waiting_flows",
            m.relay_lane_work: "work_requests",
            m.relay_lane_sent: "sent_bytes",
            m.relay_lane_received: "received_bytes",
            m.relay_lane_damaged: "checksum_failures",
        }
        by_peer = {lane.peer: lane for lane in lanes}
        for peer in self._peers - set(by_peer):
            for gauge in gauges:
                gauge.remove(peer)
        self._peers = set[str](by_peer)
        for peer, lane in by_peer.items():
            for gauge, name in gauges.items():
                gauge.labels(peer).set(getattr(lane, name))

    def flow_closed(self, closed: FlowClosed) -> None:
        cause = "done" if closed.fault is None else closed.fault.code
        self._metrics.relay_flows_ended.labels(closed.side.value, cause).inc()
        if closed.side is Side.IN and cause == ChecksumMismatch.code:
            self._metrics.relay_checksum_failures.inc()
