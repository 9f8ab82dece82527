"""How long the ingress may wait for each step of a request before it plans anew."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_shared.messages.route import Deadlines, Prediction


@dataclass(frozen=True, slots=True)
class DeadlinePolicy:
    """Floors carry a cold or loaded machine; the margin scales with what was predicted."""

    ttft_floor_s: float = 30.0
    transfer_floor_s: float = 10.0
    """On top of the time to the first token."""
    stall_floor_s: float = 15.0
    margin: float = 10.0
    """Times p90: an attempt that takes ten times as long as nine in ten do is not coming back."""
    ceiling_s: float = 600.0

    def for_prediction(self, predicted: Prediction, crossing_s: float) -> Deadlines:
        ttft_s = min(self.ceiling_s, max(self.ttft_floor_s, self.margin * predicted.ttft_p90_s))
        transfer_s = ttft_s + max(self.transfer_floor_s, self.margin * crossing_s)
        stall_s = max(self.stall_floor_s, self.margin * predicted.itl_p90_s)
        return Deadlines(
            ttft_s=ttft_s,
            transfer_s=min(2 * self.ceiling_s, transfer_s),
            stall_s=min(self.ceiling_s, stall_s),
        )
