"""What both sides of the relay's core share: pool, lanes, clients, timers, fences, the effects of the event at hand."""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from isthmus_kvrelay.core.credit import CreditAccount
from isthmus_kvrelay.core.events import ClientId, Effect, FlowClosed, FlowKey, LaneId, Side, SlotUse
from isthmus_kvrelay.core.order import FairOrder
from isthmus_kvrelay.core.pacer import Pacer
from isthmus_kvrelay.core.staging import Pin, Staging
from isthmus_shared.errors import Fault
from isthmus_shared.ids import Generation, Incarnation, TransferId

FENCES = 65_536
"""Transfers whose newest generation is remembered; hours at ten transfers a second, 10 MB at most."""
ENDED = 4_096
"""Flows whose end is remembered, so that a late question gets the true reason."""
MAX_FLOWS = 4_096
"""Open flows per side; one more is refused. Bounds what queued and connecting flows cost."""
LANE_WINDOW_CHUNKS = 32
"""Chunks handed to one lane's transport at a time: keeps its streams busy (8 MiB at the default slot size) while
deadlines and fairness still decide what comes after."""


@dataclass(frozen=True, slots=True)
class RelaySettings:
    incarnation: Incarnation
    slot_bytes: int
    total_slots: int
    out_share: float
    rate_bytes_per_s: float = math.inf
    """Per lane."""

    @property
    def out_limit(self) -> int:
        return min(self.total_slots - 1, max(1, int(self.total_slots * self.out_share)))


@dataclass(slots=True)
class Lane:
    lane: LaneId
    peer: Incarnation
    pacer: Pacer
    order: FairOrder = field(default_factory=FairOrder)
    in_transport: int = 0
    wake_s: float = -math.inf
    """When the pacer's timer is set for; in the past: it is not set."""


@dataclass(slots=True)
class Counters:
    sent_bytes: int = 0
    received_bytes: int = 0
    stale: int = 0
    """Late, repeated or unknown messages and chunks that were refused."""
    delivered: Counter[Side] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    """By fault code."""


class Ledger:
    def __init__(self, settings: RelaySettings) -> None:
        self.settings = settings
        self.staging = Staging(total_slots=settings.total_slots, out_limit=settings.out_limit)
        self.credit = CreditAccount()
        self.count = Counters()
        self.clients: set[ClientId] = set()
        self.lanes: dict[LaneId, Lane] = {}
        self.lane_to: dict[Incarnation, LaneId] = {}
        self.draining = False
        self.now_s = 0.0
        self.effects: list[Effect] = []
        self._fences: dict[Side, OrderedDict[TransferId, Generation]] = {
            Side.OUT: OrderedDict(),
            Side.IN: OrderedDict(),
        }
        self._ended: OrderedDict[tuple[Side, FlowKey], Fault | None] = OrderedDict()
        self._holds: dict[tuple[ClientId, Pin, FlowKey], set[SlotUse]] = {}
        self._timers: list[tuple[float, int]] = []
        self._timer_no = 0

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    # --- fences

    def fence(self, side: Side, key: FlowKey) -> bool:
        """Whether that generation is newer than any seen here; then older ones are refused from now on."""
        seen = self._fences[side]
        if seen.get(key.transfer_id, 0) >= key.generation:
            return False
        seen[key.transfer_id] = key.generation
        seen.move_to_end(key.transfer_id)
        while len(seen) > FENCES:
            seen.popitem(last=False)
        return True

    def closed(self, side: Side, key: FlowKey, *, total_bytes: int, opened_s: float, fault: Fault | None) -> None:
        """The one terminal event of a flow's end: counted, remembered, told to the shell."""
        assert (side, key) not in self._ended, "a flow ended twice"
        self._ended[side, key] = fault
        while len(self._ended) > ENDED:
            self._ended.popitem(last=False)
        if fault is None:
            self.count.delivered[side] += 1
        else:
            self.count.failed[fault.code] += 1
        self.emit(FlowClosed(key, side, total_bytes, self.now_s - opened_s, fault))

    def reason(self, side: Side, key: FlowKey) -> Fault | None:
        """Why a flow that is over failed, if that is still known."""
        return self._ended.get((side, key))

    # --- holds: slots that a client's engine may touch

    def hold(self, client: ClientId, pin: Pin, key: FlowKey, slots: tuple[SlotUse, ...]) -> None:
        for ref in slots:
            self.staging.pin(ref, pin)
        self._holds[client, pin, key] = set(slots)

    def let_go(self, client: ClientId, pin: Pin, key: FlowKey, only: SlotUse | None = None) -> None:
        held = self._holds.get((client, pin, key), set())
        for ref in list(held) if only is None else [only]:
            held.discard(ref)
            self.staging.unpin(ref, pin)
        if not held:
            self._holds.pop((client, pin, key), None)

    def let_go_all(self, client: ClientId) -> None:
        for holder, pin, key in list(self._holds):
            if holder == client:
                self.let_go(holder, pin, key)

    @property
    def holds(self) -> int:
        return len(self._holds)

    # --- time

    def wake_at(self, at_s: float) -> None:
        """`handle` will be called at that time or soon after; who asked looks then whether its time has come."""
        self._timer_no += 1
        heapq.heappush(self._timers, (at_s, self._timer_no))

    def past(self) -> bool:
        """Drops the timers that are due; whether there were any."""
        due = False
        while self._timers and self._timers[0][0] <= self.now_s:
            heapq.heappop(self._timers)
            due = True
        return due

    def next_deadline_s(self) -> float | None:
        return self._timers[0][0] if self._timers else None
