"""Credit in KV blocks: a flow is granted only when its consumer's engine says that it can take it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from isthmus_kvrelay.core.events import StepReported
from isthmus_kvrelay.core.flow import InFlow, InState
from isthmus_kvrelay.core.gate import Gate
from isthmus_kvrelay.core.ledger import Ledger
from isthmus_kvrelay.core.names import ClientId, FlowKey

ROOM_STALE_S = 5.0
"""After so long without a report the last one binds nobody: an idle engine reports nothing, and has room."""


class KvRoom:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._gate = Gate()
        self._block_tokens: dict[ClientId, int] = {}
        self._until_s: dict[ClientId, float] = {}
        self._wake_s = -math.inf
        self._open: list[FlowKey] = []
        """Flows that need no room, in order of arrival."""

    def step(self, event: StepReported) -> None:
        led, client = self._ledger, event.client
        if not led.settings.kv_block_credit or client not in led.clients:
            return
        self._gate.set_limit(client, event.kv_blocks_free)
        self._block_tokens[client] = event.kv_block_tokens
        self._until_s[client] = led.now_s + ROOM_STALE_S
        self._arm()

    def client_down(self, client: ClientId) -> None:
        self._gate.set_limit(client, None)
        self._block_tokens.pop(client, None)
        self._until_s.pop(client, None)

    def ask(self, flow: InFlow) -> None:
        block_tokens = self._block_tokens.get(flow.client)
        if block_tokens is None or not flow.kv_tokens:
            self._open.append(flow.key)
            return
        self._gate.ask(flow.client, flow.key, -(-flow.kv_tokens // block_tokens))

    def admit(self, flows: Mapping[FlowKey, InFlow]) -> Iterator[FlowKey]:
        free, self._open = self._open, []
        yield from (key for key in free if key in flows and flows[key].state is InState.BLOCKED)
        for key, blocks in self._gate.admit():
            flows[key].kv_blocks = blocks
            self._ledger.credit.kv_blocks.grant(blocks)
            yield key

    def used(self, flow: InFlow) -> None:
        """Its KV is in the engine."""
        if flow.kv_blocks:
            self._ledger.credit.kv_blocks.consume(flow.kv_blocks)
            self._gate.used_up(flow.client, flow.kv_blocks)
            flow.kv_blocks = 0

    def give_back(self, flow: InFlow) -> None:
        self._gate.leave(flow.client, flow.key)
        if flow.kv_blocks:
            self._ledger.credit.kv_blocks.take_back(flow.kv_blocks)
            self._gate.give_back(flow.client, flow.kv_blocks)
            flow.kv_blocks = 0

    def expire(self) -> None:
        now_s = self._ledger.now_s
        for client in [client for client, until_s in self._until_s.items() if until_s <= now_s]:
            self._gate.set_limit(client, None)
            del self._until_s[client]
        self._arm()

    def _arm(self) -> None:
        """One timer for all, set again when it is due."""
        if self._until_s and self._wake_s <= self._ledger.now_s:
            self._wake_s = min(self._until_s.values())
            self._ledger.wake_at(self._wake_s)

    def check_invariants(self, flows: Iterable[InFlow]) -> None:
        held = sum(flow.kv_blocks for flow in flows)
        self._ledger.credit.kv_blocks.check_in_flight(held)
        assert self._gate.held_by_all == held
        self._gate.check_invariants()
