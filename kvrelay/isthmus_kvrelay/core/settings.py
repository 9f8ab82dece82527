"""What one relay's core is given: sizes, shares, and which credits are in force."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus_shared.ids import Incarnation

WORK_REQUESTS = 256
"""Default of one lane: 256 MiB at the default slot size, enough for a link of 25 GB/s over 10 ms, and well below the
smallest queue of an RDMA device seen in practice (4,351)."""
RETAIN_SHARE = 0.25
"""Default, of the out-share: retained flows are a bet on a destination's death; three quarters always turn over."""
RETARGET_WAIT_S = 30.0
"""More than the longest prefill takes, which the ingress lets finish before it names another destination."""


@dataclass(frozen=True, slots=True)
class RelaySettings:
    incarnation: Incarnation
    slot_bytes: int
    total_slots: int
    out_share: float
    rate_bytes_per_s: float = math.inf
    """Ceiling per lane; the planner's word can only lower it."""
    retain_bytes: int | None = None
    """Staging that flows which are over may keep; None: `RETAIN_SHARE` of the out-share. 0 switches it off."""
    client_share: float = 1.0
    """Of each direction's share of the pool, what one client may hold."""
    work_requests: int | None = WORK_REQUESTS
    """Credit: chunks under way to this relay on one lane. None switches it off."""
    kv_block_credit: bool = True
    """Credit: a flow is granted only within the KV blocks that its consumer says are free."""
    host_us_per_step: float = 0.0
    """Credit: CPU microseconds that receiving may cost per decode step of a consumer. 0 switches it off."""
    feedback: bool = True
    """Whether senders are told the consumers' inter-token latency."""
    retarget_wait_s: float = RETARGET_WAIT_S
    """For a flow that is still being filled, after its consumer was lost; then its producer is told."""

    def __post_init__(self) -> None:
        assert self.work_requests is None or self.work_requests > 0
        assert 0 < self.client_share <= 1

    @property
    def out_limit(self) -> int:
        return min(self.total_slots - 1, max(1, int(self.total_slots * self.out_share)))

    @property
    def in_limit(self) -> int:
        return self.total_slots - self.out_limit

    @property
    def retain_limit(self) -> int:
        if self.retain_bytes is None:
            return int(self.out_limit * RETAIN_SHARE)
        return min(self.out_limit, self.retain_bytes // self.slot_bytes)

    def client_limit(self, share: int) -> int:
        """Slots of a direction's `share` that one client may hold."""
        return max(1, int(share * self.client_share))
