"""Revoked landing slots: not to be used until their sender has said that it is quiet, or its lane is gone."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus_kvrelay.core.effects import CloseLane
from isthmus_kvrelay.core.ledger import Ledger
from isthmus_kvrelay.core.names import FlowKey, LaneId, SlotUse
from isthmus_kvrelay.core.staging import Pin
from isthmus_shared.errors import ProtocolViolation

QUIET_TIMEOUT_S = 10.0
"""A sender has at most `LANE_WINDOW_CHUNKS` under way: milliseconds. One that does not answer is not trusted with a
timeout: its lane is closed, and that is the fence."""


class Quarantine:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: dict[tuple[LaneId, FlowKey, int], tuple[float, tuple[SlotUse, ...]]] = {}
        """By pull: until when, and which slots."""

    def begin(self, lane: LaneId, key: FlowKey, pull: int, slots: Iterable[SlotUse]) -> None:
        """Before the flow gives its slots back."""
        led, refs = self._ledger, tuple(slots)
        for ref in refs:
            led.staging.pin(ref, Pin.SENDER)
        until_s = led.now_s + QUIET_TIMEOUT_S
        self._waiting[lane, key, pull] = (until_s, refs)
        led.wake_at(until_s)

    def quiet(self, lane: LaneId, key: FlowKey, pull: int) -> bool:
        """Whether that was waited for."""
        waited = self._waiting.pop((lane, key, pull), None)
        if waited is None:
            return False
        for ref in waited[1]:
            self._ledger.staging.unpin(ref, Pin.SENDER)
        return True

    def lane_down(self, lane: LaneId) -> None:
        for name in [name for name in self._waiting if name[0] == lane]:
            self.quiet(*name)

    def expire(self) -> None:
        """In order of `begin`, so the first that is not due ends the search."""
        late = set()
        for (lane, _, _), (until_s, _) in self._waiting.items():
            if until_s > self._ledger.now_s:
                break
            late.add(lane)
        for lane in sorted(late):
            fault = ProtocolViolation(f"the peer did not give revoked slots up within {QUIET_TIMEOUT_S} s").to_fault()
            self._ledger.emit(CloseLane(lane, fault))
            self.lane_down(lane)

    def check_invariants(self) -> None:
        for (lane, _, _), (_, refs) in self._waiting.items():
            assert lane in self._ledger.lanes
            assert all(self._ledger.staging.pinned(ref, Pin.SENDER) for ref in refs)
