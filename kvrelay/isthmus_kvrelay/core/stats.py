"""A moment's state of a relay and its sums since the start, for heartbeats, metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_kvrelay.core.ledger import Lane, Ledger
from isthmus_kvrelay.core.names import Side
from isthmus_kvrelay.core.staging import SlotState
from isthmus_shared.ids import Incarnation


@dataclass(frozen=True, slots=True)
class LaneStats:
    peer: Incarnation
    sent_bytes: int
    received_bytes: int
    rate_bytes_per_s: float
    """What the pacer allows now; `math.inf` is no pacing."""
    queue_age_s: float
    """How long the lane has had chunks to send without a pause."""
    waiting_flows: int
    in_transport_chunks: int
    work_requests: int
    """Credit out to the peer, in chunks."""
    decreases: int
    checksum_failures: int


@dataclass(frozen=True, slots=True)
class CreditStats:
    granted: int
    consumed: int
    returned: int


@dataclass(frozen=True, slots=True)
class RelayStats:
    slots: dict[SlotState, int]
    slots_total: int
    slot_bytes: int
    flows_out: int
    flows_in: int
    clients: int
    lanes: int
    credits: dict[str, CreditStats]
    """By kind: staging_bytes, staging_slots, work_requests, kv_blocks, host_us."""
    credits_granted_bytes: int
    credits_outstanding_bytes: int
    quarantines: int
    """Slots put into quarantine since the start."""
    sent_bytes: int
    received_bytes: int
    sent_via: dict[str, int]
    """Bytes by what carried them."""
    received_via: dict[str, int]
    stale: int
    retargets: int
    revivals: int
    decreases: int
    """Cuts of a lane's rate after feedback."""
    delivered_out: int
    delivered_in: int
    failures: dict[str, int]
    """By fault code."""
    by_lane: tuple[LaneStats, ...]

    @property
    def slots_usable(self) -> int:
        """Free, or kept only as long as nobody needs them."""
        return self.slots[SlotState.FREE] + self.slots[SlotState.RETAINED]

    @property
    def at_rest(self) -> bool:
        """Nothing is held for anybody."""
        return self.slots_usable == self.slots_total and not self.flows_out and not self.flows_in


def stats_of(led: Ledger, *, flows_out: int, flows_in: int) -> RelayStats:
    credit = led.credit
    accounts = {
        "staging_bytes": credit.staging_bytes,
        "staging_slots": credit.staging_slots,
        "work_requests": credit.work_requests,
        "kv_blocks": credit.kv_blocks,
        "host_us": credit.host_us,
    }
    return RelayStats(
        slots=led.staging.by_state(),
        slots_total=led.settings.total_slots,
        slot_bytes=led.settings.slot_bytes,
        flows_out=flows_out,
        flows_in=flows_in,
        clients=len(led.clients),
        lanes=len(led.lanes),
        credits={kind: CreditStats(a.granted, a.consumed, a.returned) for kind, a in accounts.items()},
        credits_granted_bytes=credit.staging_bytes.granted,
        credits_outstanding_bytes=credit.staging_bytes.in_flight,
        quarantines=led.staging.quarantines,
        sent_bytes=led.count.sent_bytes,
        received_bytes=led.count.received_bytes,
        sent_via=dict(led.count.sent_via),
        received_via=dict(led.count.received_via),
        stale=led.count.stale,
        retargets=led.count.retargets,
        revivals=led.count.revivals,
        decreases=led.count.decreases + sum(lane.aimd.decreases for lane in led.lanes.values()),
        delivered_out=led.count.delivered[Side.OUT],
        delivered_in=led.count.delivered[Side.IN],
        failures=dict(led.count.failed),
        by_lane=tuple(_of_lane(lane, led.now_s) for lane in led.lanes.values()),
    )


def _of_lane(lane: Lane, now_s: float) -> LaneStats:
    return LaneStats(
        peer=lane.peer,
        sent_bytes=lane.sent_bytes,
        received_bytes=lane.received_bytes,
        rate_bytes_per_s=lane.pacer.rate,
        queue_age_s=max(0.0, now_s - lane.waiting_since_s) if len(lane.order) else 0.0,
        waiting_flows=len(lane.order),
        in_transport_chunks=lane.in_transport,
        work_requests=lane.work_requests,
        decreases=lane.aimd.decreases,
        checksum_failures=lane.checksum_failures,
    )
