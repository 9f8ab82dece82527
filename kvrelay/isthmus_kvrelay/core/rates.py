"""How fast each lane may go: at most what operator and planner allow, and below that what feedback asks for."""

from __future__ import annotations

import math

from isthmus_kvrelay.core.events import FeedbackReceived, LaneUp, RatesSet
from isthmus_kvrelay.core.feedback import Aimd
from isthmus_kvrelay.core.ledger import Lane, Ledger
from isthmus_kvrelay.core.pacer import Pacer
from isthmus_shared.ids import Incarnation

PACER_BURST_CHUNKS = 4
"""Burst of a lane's pacer: enough for two streams to each have one chunk on the wire and one behind it."""


class Rates:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._default = math.inf
        self._by_peer: dict[Incarnation, float] = {}
        self._until_s = math.inf

    def lane_up(self, event: LaneUp) -> Lane:
        led, ceiling = self._ledger, self._ceiling(event.peer)
        depth = min((d for d in (led.settings.work_requests, event.depth) if d is not None), default=None)
        burst = PACER_BURST_CHUNKS * led.settings.slot_bytes
        pacer = Pacer(rate_bytes_per_s=ceiling, burst_bytes=burst, now_s=led.now_s)
        aimd = Aimd(ceiling=ceiling, now_s=led.now_s)
        lane = Lane(event.lane, event.peer, pacer, aimd, up_s=led.now_s, via=event.via, depth=depth)
        lane.metered_s = led.now_s
        return lane

    def set(self, event: RatesSet) -> None:
        """The planner's word; a later one replaces it as a whole."""
        led = self._ledger
        self._default = math.inf if event.default is None else event.default
        self._by_peer = dict(event.by_peer)
        self._until_s = led.now_s + event.valid_s
        led.wake_at(self._until_s)
        self._apply_ceilings()

    def feedback(self, event: FeedbackReceived) -> None:
        led = self._ledger
        lane = led.lanes.get(event.lane)
        if lane is None or not led.settings.feedback:
            return
        measured = lane.measured(led.now_s)
        lane.aimd.report(itl_s=event.itl_s, target_s=event.target_s, measured=measured, now_s=led.now_s)
        self._apply(lane)

    def expire(self) -> None:
        led = self._ledger
        if self._until_s <= led.now_s:
            self._default, self._by_peer, self._until_s = math.inf, {}, math.inf
            self._apply_ceilings()
        for lane in led.lanes.values():
            lane.aimd.lapse(now_s=led.now_s)
            self._apply(lane)

    def _ceiling(self, peer: Incarnation) -> float:
        return min(self._ledger.settings.rate_bytes_per_s, self._by_peer.get(peer, self._default))

    def _apply_ceilings(self) -> None:
        for lane in self._ledger.lanes.values():
            lane.aimd.set_ceiling(self._ceiling(lane.peer), now_s=self._ledger.now_s)
            self._apply(lane)

    def _apply(self, lane: Lane) -> None:
        """The pacer follows, and looks again when nobody reports any more."""
        led = self._ledger
        if lane.pacer.rate != lane.aimd.rate:
            lane.pacer.set_rate(lane.aimd.rate, now_s=led.now_s)
            lane.wake_s = -math.inf
        again_s = lane.aimd.look_again_s()
        if again_s is not None and lane.aimd_wake_s <= led.now_s:
            lane.aimd_wake_s = max(again_s, led.now_s)
            led.wake_at(lane.aimd_wake_s)
