"""Pulls that carry their first credit, so that a small transfer takes no more messages than one.

Only when all that a flow needs can be had at once: nobody waits before it for KV blocks, a share of the pool, slots,
work requests or host time. Otherwise it asks plainly, and reserves when the source has answered. A source that cannot
use the credit (its own staging is not there yet, or is cut otherwise) declines, and the reservation is given back: so
nobody ever holds landing slots for a source that waits, which two relays could do to each other.

What the source may do with that credit is settled by one thing only: it sends, or it declines. Until the first chunk
has landed no further credit goes out, since it might cross the source's word that it declines.
"""

from __future__ import annotations

from collections.abc import Mapping

from isthmus_kvrelay.core.effects import RevokeFlow, SendPull
from isthmus_kvrelay.core.events import DeclinedReceived
from isthmus_kvrelay.core.flow import InFlow, InInput, InState, chunk_count
from isthmus_kvrelay.core.gate import Gate
from isthmus_kvrelay.core.granting import Granting
from isthmus_kvrelay.core.ledger import Lane, Ledger
from isthmus_kvrelay.core.names import FlowKey, Side
from isthmus_kvrelay.core.room import KvRoom

EAGER_CHUNKS = 64
"""Most chunks of a flow that is asked for so: two windows of a lane. A larger one gains nothing that shows."""


class Eager:
    def __init__(
        self, ledger: Ledger, flows: Mapping[FlowKey, InFlow], room: KvRoom, quota: Gate, granting: Granting
    ) -> None:
        self._ledger, self._flows = ledger, flows
        self._room, self._quota, self._granting = room, quota, granting
        self._trying: dict[FlowKey, None] = {}
        """Begun in the event at hand: settling shows whether they get through."""

    def begin(self, flow: InFlow, lane: Lane) -> bool:
        """Whether to try; then the pull is sent when the event at hand has been settled."""
        if not lane.chunk_bytes or chunk_count(flow.total_bytes, lane.chunk_bytes) > self._limit:
            return False
        flow.chunk_bytes, flow.eager = lane.chunk_bytes, True
        flow.advance(InInput.PRESUMED)
        self._room.ask(flow)
        self._trying[flow.key] = None
        return True

    @property
    def _limit(self) -> int:
        settings = self._ledger.settings
        return min(EAGER_CHUNKS, settings.client_limit(settings.in_limit))

    def settle(self) -> bool:
        """After all that can be granted has been: those that got nothing ask plainly. Whether there were any."""
        trying, self._trying = self._trying, {}
        late = [flow for key in trying if (flow := self._flows.get(key)) is not None and not flow.in_flight]
        for flow in late:
            assert flow.lane is not None
            self._step_back(flow)
            self._ledger.emit(SendPull(flow.lane, flow.key, flow.pull, None))
        return bool(late)

    def declined(self, event: DeclinedReceived) -> None:
        flow = self._flows.get(event.key)
        current = flow is not None and (flow.lane, flow.pull) == (event.lane, event.pull)
        if flow is None or not current or not flow.eager or flow.state is not InState.LANDING or flow.landed:
            self._ledger.count.stale += 1
            return
        self._ledger.emit(RevokeFlow(event.lane, event.key))
        self._step_back(flow)

    def _step_back(self, flow: InFlow) -> None:
        """To a plain pull. Slots that were named to the source wait only for this end: it has said it won't write."""
        led = self._ledger
        self._granting.end(flow)
        self._room.give_back(flow)
        led.staging.leave_queue(Side.IN, flow.key)
        self._quota.leave(flow.client, flow.key)
        if flow.counted:
            flow.counted = False
            self._quota.give_back(flow.client, flow.chunks)
        for ref in flow.slots:
            led.staging.give_back(ref)
        flow.step_back()

    def check_invariants(self) -> None:
        assert not self._trying
