"""What both sides of the relay's core share: pool, lanes, clients, timers, fences, the effects of the event at hand."""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from isthmus_kvrelay.core.credit import Credits
from isthmus_kvrelay.core.effects import Effect, FlowClosed
from isthmus_kvrelay.core.feedback import Aimd
from isthmus_kvrelay.core.names import ClientId, FlowKey, LaneId, Side, SlotUse
from isthmus_kvrelay.core.order import FairOrder
from isthmus_kvrelay.core.pacer import Pacer
from isthmus_kvrelay.core.settings import RelaySettings as RelaySettings
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


METER_S = 0.05
"""The least time over which a lane's rate is measured: some chunks at any rate worth pacing."""
MAX_SAMPLES = 4_096
"""Chunk times that wait for the shell to take them; beyond it the oldest go."""


@dataclass(slots=True)
class Lane:
    lane: LaneId
    peer: Incarnation
    pacer: Pacer
    aimd: Aimd
    up_s: float
    via: str = "tcp"
    depth: int | None = None
    """Work requests: the least of what is configured and what its transport has room for; None: no bound."""
    order: FairOrder = field(default_factory=FairOrder)
    """Of the flows that have something to send on it."""
    waiting_since_s: float = 0.0
    """Since when `order` has not been empty."""
    in_transport: int = 0
    wake_s: float = -math.inf
    """When the pacer's timer is set for; in the past: it is not set."""
    aimd_wake_s: float = -math.inf
    sent_bytes: int = 0
    received_bytes: int = 0
    metered_s: float = 0.0
    metered_bytes: int = 0
    """`sent_bytes` as of `metered_s`: what feedback measures from."""
    work_requests: int = 0
    """Credit of that kind that is out to the peer."""
    chunk_bytes: int = 0
    """How the peer cuts what it sends, as of its last answer to a pull; 0: it has not said."""
    granting: dict[FlowKey, None] = field(default_factory=dict)
    """Incoming flows with chunks that have no credit yet, the oldest first."""
    told_s: float = -math.inf
    """When the peer was last told of a consumer's latency."""
    checksum_failures: int = 0

    def measured(self, now_s: float) -> float:
        """Bytes per second sent since the last call that was not too soon after another."""
        gap_s = now_s - self.metered_s
        rate = (self.sent_bytes - self.metered_bytes) / gap_s if gap_s > 0 else 0.0
        if gap_s >= METER_S:
            self.metered_s, self.metered_bytes = now_s, self.sent_bytes
        return rate


@dataclass(slots=True)
class Counters:
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_via: Counter[str] = field(default_factory=Counter)
    """The same by what carried them; a lane's that is gone included."""
    received_via: Counter[str] = field(default_factory=Counter)
    stale: int = 0
    """Late, repeated or unknown messages and chunks that were refused."""
    delivered: Counter[Side] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    """By fault code."""
    retargets: int = 0
    """Pulls of a flow that another destination had pulled before."""
    revivals: int = 0
    """Those of them that a retained flow served."""
    decreases: int = 0
    """Cuts of a lane's rate after feedback, on lanes that are gone."""
    queue_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    """Of each chunk sent: how long it was filled and credited before it went."""
    landing_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    """Of each chunk landed: how long after its credit."""


class Ledger:
    def __init__(self, settings: RelaySettings, carry_out: Callable[[Effect], None] | None = None) -> None:
        self.settings = settings
        self._carry_out = carry_out
        self.staging = Staging(
            total_slots=settings.total_slots, out_limit=settings.out_limit, retain_limit=settings.retain_limit
        )
        self.credit = Credits()
        self.count = Counters()
        self.clients: set[ClientId] = set()
        self.lanes: dict[LaneId, Lane] = {}
        self.lane_to: dict[Incarnation, LaneId] = {}
        self.draining = False
        self.now_s = 0.0
        self.effects: list[Effect] = []
        self._fences: dict[Side, OrderedDict[TransferId, tuple[Generation, int]]] = {
            Side.OUT: OrderedDict(),
            Side.IN: OrderedDict(),
        }
        self._ended: OrderedDict[tuple[Side, FlowKey], Fault | None] = OrderedDict()
        self._holds: dict[tuple[ClientId, Pin, FlowKey], set[SlotUse]] = {}
        self._timers: list[tuple[float, int, tuple[Side, FlowKey] | None]] = []
        self._timer_no = 0

    def emit(self, effect: Effect) -> None:
        if self._carry_out is None:
            self.effects.append(effect)
        else:
            self._carry_out(effect)

    # --- fences

    def fence(self, side: Side, key: FlowKey, pull: int = 0) -> bool:
        """Whether that generation (or that pull of it) is newer than any seen here; then older ones are refused."""
        seen = self._fences[side]
        newest = seen.get(key.transfer_id)
        if newest is not None and newest >= (key.generation, pull):
            return False
        seen[key.transfer_id] = (key.generation, pull)
        seen.move_to_end(key.transfer_id)
        while len(seen) > FENCES:
            seen.popitem(last=False)
        return True

    def closed(
        self, side: Side, key: FlowKey, *, pull: int, total_bytes: int, opened_s: float, fault: Fault | None
    ) -> None:
        """The one terminal event of a flow's end: counted, remembered, told to the shell."""
        self._ended[side, key] = fault
        self._ended.move_to_end((side, key))
        while len(self._ended) > ENDED:
            self._ended.popitem(last=False)
        if fault is None:
            self.count.delivered[side] += 1
        else:
            self.count.failed[fault.code] += 1
        self.emit(FlowClosed(key, pull, side, total_bytes, self.now_s - opened_s, fault))

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

    def wake_at(self, at_s: float, of: tuple[Side, FlowKey] | None = None) -> None:
        """`handle` will be called at that time or soon after, and look at the flow that is named."""
        self._timer_no += 1
        heapq.heappush(self._timers, (at_s, self._timer_no, of))

    def due(self) -> tuple[bool, list[tuple[Side, FlowKey]]]:
        """Drops the timers whose time has come: whether there were any, and the flows that they name."""
        any_due, named = False, []
        while self._timers and self._timers[0][0] <= self.now_s:
            any_due = True
            of = heapq.heappop(self._timers)[2]
            if of is not None:
                named.append(of)
        return any_due, named

    def next_deadline_s(self) -> float | None:
        return self._timers[0][0] if self._timers else None
