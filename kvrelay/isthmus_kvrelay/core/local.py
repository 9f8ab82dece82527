"""Flows whose two ends are clients of this relay: no lane, no copy; the consumer reads the producer's slots.

The consumer is told the slots while the producer still fills them (`Attached`), and from then on holds them, so that
the producer can tell it directly that all is filled: no slot of a flow that ends meanwhile is used again before that
consumer has let go. The relay's own word (`SourceReady`) follows in any case. A consumer that was told directly may be
done before the relay has read the producer's last word; then the flow waits for that word (`InFlow.consumed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from isthmus_kvrelay.core.effects import Attached
from isthmus_kvrelay.core.flow import InFlow, InState, OutFlow, mismatch_of
from isthmus_kvrelay.core.ledger import Ledger
from isthmus_kvrelay.core.names import FlowKey, Side
from isthmus_kvrelay.core.out_side import OutSide
from isthmus_kvrelay.core.staging import Pin
from isthmus_shared.errors import IsthmusError, StaleParty


class Local:
    def __init__(self, ledger: Ledger, out: OutSide, flows: Mapping[FlowKey, InFlow]) -> None:
        self._ledger, self._out, self._flows = ledger, out, flows
        self._attached: dict[FlowKey, None] = {}

    def __contains__(self, key: FlowKey) -> bool:
        return key in self._attached

    def attach(self, flow: InFlow) -> IsthmusError | None:
        """Take the flow for its consumer, or say why it cannot have it."""
        flow.state = InState.ATTACHED
        refusal = self._out.take(flow.key, flow.pull)
        if refusal is not None:
            return refusal
        out = self._out.flows[flow.key]
        mismatch = mismatch_of(source=out.content, consumer=flow.content)
        if mismatch is not None:
            self._out.fail(out, mismatch)
            return mismatch
        out.local = True
        self._attached[flow.key] = None
        return None

    def forget(self, key: FlowKey) -> None:
        self._attached.pop(key, None)

    def source_of(self, flow: InFlow) -> OutFlow | None:
        out = self._out.flows.get(flow.key)
        here = flow.peer == self._ledger.settings.incarnation
        return out if here and out is not None and out.local and out.pull == flow.pull else None

    def ready(self) -> Iterator[tuple[InFlow, OutFlow]]:
        """Those whose producer has filled all. The consumers of the others are told where it will be."""
        for key in list(self._attached):
            flow, out = self._flows[key], self._out.flows[key]
            if out.all_filled:
                del self._attached[key]
                yield flow, out
            elif out.slots and not flow.held:
                self._show(flow, out)

    def _show(self, flow: InFlow, out: OutFlow) -> None:
        led = self._ledger
        assert out.owner is not None
        flow.held = True
        led.hold(flow.client, Pin.CONSUMER, flow.key, out.slots)
        slots = tuple(ref.slot for ref in out.slots)
        led.emit(Attached(out.owner, flow.client, flow.key, flow.pull, slots, out.chunk_bytes))

    def lost(self) -> Iterator[tuple[InFlow, IsthmusError]]:
        """Those whose source ended, or went to another destination."""
        lost, self._out.local_lost = self._out.local_lost, []
        for key in lost:
            flow = self._flows.get(key)
            if flow is None or flow.peer != self._ledger.settings.incarnation or self.source_of(flow) is not None:
                continue
            reason = None if key in self._out.flows else self._ledger.reason(Side.OUT, key)
            yield flow, reason.to_error() if reason else StaleParty("another destination took the transfer over")

    def check_invariants(self) -> None:
        for key, flow in self._flows.items():
            assert (flow.state is InState.ATTACHED) == (key in self._attached)
            assert not flow.consumed or (flow.held and flow.state is InState.ATTACHED)
            if flow.state is InState.ATTACHED:
                assert self.source_of(flow) is not None
