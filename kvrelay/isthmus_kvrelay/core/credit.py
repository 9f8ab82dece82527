"""Receiver-issued credit, in slots and in bytes.

Conservation, at every moment: granted = in flight + consumed + returned. Later kinds of credit (decode blocks, work
requests, host time per step) are further units of the same account.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CreditAccount:
    """What a receiver has granted since it started. One chunk is one slot's credit and its size in bytes."""

    granted_slots: int = 0
    granted_bytes: int = 0
    consumed_slots: int = 0
    consumed_bytes: int = 0
    returned_slots: int = 0
    returned_bytes: int = 0

    def grant(self, size_bytes: int) -> None:
        self.granted_slots += 1
        self.granted_bytes += size_bytes

    def consume(self, size_bytes: int) -> None:
        """A chunk has landed."""
        self.consumed_slots += 1
        self.consumed_bytes += size_bytes

    def take_back(self, size_bytes: int) -> None:
        """The flow ended before its chunk landed."""
        self.returned_slots += 1
        self.returned_bytes += size_bytes

    @property
    def in_flight_slots(self) -> int:
        return self.granted_slots - self.consumed_slots - self.returned_slots

    @property
    def in_flight_bytes(self) -> int:
        return self.granted_bytes - self.consumed_bytes - self.returned_bytes

    def check_invariants(self, *, landing_slots: int, landing_bytes: int) -> None:
        """`landing_*`: what the flows themselves say is on its way."""
        assert self.in_flight_slots == landing_slots, (self, landing_slots)
        assert self.in_flight_bytes == landing_bytes, (self, landing_bytes)
