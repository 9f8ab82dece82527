"""What a planner knows of its cluster, ready to be routed by. Kept up to date beat by beat; nothing is made per route.

A beat, an assignment and an outcome cost the same however many workers there are; somebody who comes, goes or changes
its role costs O(workers) at the next route.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from isthmus_planner.cost.online import LiveCosts
from isthmus_planner.cost.speeds import Pending
from isthmus_planner.ledger import Ledger
from isthmus_planner.routing.ask import Crossing
from isthmus_planner.routing.group import Group, GroupKey, Standing, key_of, standing_of
from isthmus_planner.routing.policy import Policy
from isthmus_planner.routing.rails import Rails
from isthmus_planner.routing.residents import Residents
from isthmus_planner.routing.seat import UNCORRECTED, Correction, Seat, seat_of
from isthmus_planner.routing.types import Choice
from isthmus_shared.ids import Incarnation, NodeId
from isthmus_shared.messages.health import RelayHeartbeat, RelayRates, WorkerHeartbeat
from isthmus_shared.messages.outcomes import Outcome

USUAL_SHARE = 0.02
"""Of the newest answer in what is expected of the next: some fifty count."""
LINGER_S = 5.0
"""A request with a target counts as over so long after twice its predicted time."""
MAX_MODELS = 256
"""Models whose usual answer is remembered."""


@dataclass(slots=True)
class _Member:
    group: Group
    standing: Standing
    latest: WorkerHeartbeat


class View:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rails = Rails(policy.constants)
        self.ledger = Ledger()
        self._residents = Residents()
        self._groups: dict[GroupKey, Group] = {}
        self._by_model: dict[str, tuple[Group, ...]] = {}
        self._by_life: dict[Incarnation, _Member] = {}
        self._live: dict[Incarnation, LiveCosts] = {}
        self._corrections: dict[Incarnation, Correction] = {}
        self._usual_osl: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_life)

    # -- what comes in -----------------------------------------------------------------------------------------------

    def beat(self, beat: WorkerHeartbeat, now_s: float, live: LiveCosts | None = None) -> None:
        """A worker's heartbeat, and what is now known of its steps' costs."""
        life = beat.incarnation
        if live is not None:
            self._live[life] = live
        if not beat.load.running and not beat.load.waiting and not beat.load.loading:
            self._clear_residents(life, self.ledger.beat(life, now_s))
        self._heard(beat, self.ledger.beat(life, now_s), now_s)

    def lost(self, life: Incarnation) -> None:
        known = self._by_life.pop(life, None)
        if known is not None:
            self._leave(known.group, life)
        self.ledger.forget(life)
        self._residents.clear(life)
        self._live.pop(life, None)
        self._corrections.pop(life, None)

    def keep(self, alive: Iterable[Incarnation]) -> None:
        """Everyone else is lost."""
        for life in self._by_life.keys() - set(alive):
            self.lost(life)

    def relay(self, beat: RelayHeartbeat, now_s: float) -> None:
        self.rails.beat(beat, now_s)
        for group in self._groups.values():
            group.set_rail(beat.relay.node_id, self.rails)

    def keep_relays(self, nodes: Iterable[NodeId]) -> None:
        self.rails.keep(set(nodes))

    def rates(self, rates: RelayRates, now_s: float) -> None:
        self.rails.rates(rates, now_s)

    def correct(self, life: Incarnation, correction: Correction) -> None:
        """A worker drifts from what is predicted of it, or does so no longer."""
        if life not in self._by_life or self._corrections.get(life, UNCORRECTED) == correction:
            return
        self._corrections[life] = correction
        self._seat_again(life)

    def outcome(self, outcome: Outcome, now_s: float) -> None:
        """A request has ended: its targets bind no longer, and its length tells what to expect of others."""
        for life in self._residents.remove(outcome.request_id) | self._residents.expire(now_s):
            self._seat_again(life)
        if outcome.osl_tokens > 0:
            usual = self.usual_osl_tokens(outcome.model)
            self._usual_osl[outcome.model] = usual + USUAL_SHARE * (outcome.osl_tokens - usual)
            self._usual_osl.move_to_end(outcome.model)
            while len(self._usual_osl) > MAX_MODELS:
                self._usual_osl.popitem(last=False)

    def commit(self, choice: Choice, now_s: float) -> None:
        """The choice will be carried out: its work counts until beats show it."""
        request, decode = choice.request, choice.decode.beat
        blocks = -(-request.isl_tokens // decode.kv_block_tokens)
        if choice.prefill is None:
            work = Pending(prefill_tokens=self._new_tokens(choice), sequences=1, kv_blocks=blocks)
        else:
            first = Pending(prefill_tokens=self._new_tokens(choice), sequences=1)
            self._assign(choice.prefill.beat.incarnation, first, now_s)
            work = Pending(sequences=1, kv_blocks=blocks)
        changed = self._residents.expire(now_s)
        if request.slo is not None and request.slo.itl_s is not None:
            predicted = choice.predicted
            longest_s = predicted.ttft_p90_s + request.max_osl_tokens * predicted.itl_p90_s
            until_s = now_s + 2 * longest_s + LINGER_S
            changed |= self._residents.add(request.request_id, decode.incarnation, request.slo.itl_s, until_s)
        self._assign(decode.incarnation, work, now_s)
        for life in changed - {decode.incarnation}:
            self._seat_again(life)

    # -- what is asked -----------------------------------------------------------------------------------------------

    def groups(self, model: str) -> tuple[Group, ...]:
        """Of a model, by key; their columns are fresh."""
        found = self._by_model.get(model, ())
        for group in found:
            if group.stale:
                group.refresh(self.rails)
        return found

    def seats(self) -> Iterator[Seat]:
        for group in self._groups.values():
            yield from group.seats.values()

    def seat(self, life: Incarnation) -> Seat | None:
        known = self._by_life.get(life)
        return None if known is None else known.group.seats[life]

    def usual_osl_tokens(self, model: str) -> float:
        """What an answer is expected to have."""
        return self._usual_osl.get(model, self.policy.expected_osl_tokens)

    def crossing(self, prefill: Seat, decode: Seat, tokens: int, now_s: float) -> Crossing:
        """Of a prompt's KV, under the present load and ceilings. Both are of one group."""
        group = self._by_life[prefill.beat.incarnation].group
        source = self.rails.rail(prefill.beat.node_id, group.size)
        sink = self.rails.rail(decode.beat.node_id, group.size)
        size_bytes = group.crossing_bytes(tokens)
        ceiling = self.ceiling_s_per_byte(group, prefill, decode, now_s)
        transfer_s = self.rails.base_s + size_bytes * max(source.out_s_per_byte, sink.in_s_per_byte, ceiling)
        return Crossing(transfer_s, staged=size_bytes <= source.staging_free_bytes)

    def ceiling_s_per_byte(self, group: Group, prefill: Seat, decode: Seat, now_s: float) -> float:
        if group.size is None:
            return 0.0
        return 1.0 / self.rails.ceiling_bytes_per_s(prefill.beat.node_id, decode.beat.node_id, now_s)

    def check_invariants(self) -> None:
        self.ledger.check_invariants()
        self._residents.check_invariants()
        assert sum(len(group.seats) for group in self._groups.values()) == len(self._by_life)
        for group in self._groups.values():
            assert group.seats, "a group nobody is in is dropped"
            if not group.stale:
                assert all(group.seats[seat.life] is seat for seat in (*group.prefill.seats, *group.decode.seats))
                assert group.decode.seats == group.alone.seats

    # -- inside ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _new_tokens(choice: Choice) -> int:
        return max(1, choice.request.isl_tokens - choice.predicted.cached_tokens)

    def _assign(self, life: Incarnation, work: Pending, now_s: float) -> None:
        known = self._by_life.get(life)
        pending = self.ledger.add(life, work, now_s)
        if known is not None:
            old = known.group.seats[life]
            ready_s = max(now_s, old.ready_s) + old.queue_s(work.prefill_tokens)
            known.group.put(self._seat(known.latest, known, pending, now_s, ready_s))

    def _seat_again(self, life: Incarnation) -> None:
        known = self._by_life.get(life)
        if known is not None:
            ready_s = known.group.seats[life].ready_s
            known.group.put(self._seat(known.latest, known, self.ledger.pending(life), ready_s, ready_s))

    def _heard(self, beat: WorkerHeartbeat, pending: Pending, now_s: float) -> None:
        life, standing = beat.incarnation, standing_of(beat)
        known = self._by_life.get(life)
        if known is not None and known.standing == standing:
            known.latest = beat
            known.group.put(self._seat(beat, known, pending, now_s, None))
            return
        if known is not None:
            self._leave(known.group, life)
        self._join(self._seat(beat, None, pending, now_s, None), standing)

    def _seat(
        self, beat: WorkerHeartbeat, known: _Member | None, pending: Pending, now_s: float, ready_s: float | None
    ) -> Seat:
        life, policy = beat.incarnation, self.policy
        price = policy.prices.get(beat.worker_id, policy.prices.get(beat.vendor, 0.0)) if policy.prices else 0.0
        return seat_of(
            beat,
            policy.constants,
            now_s=now_s,
            ready_s=ready_s,
            live=self._live.get(life),
            pending=pending,
            targets=self._residents.of(life),
            correction=self._corrections.get(life, UNCORRECTED),
            dollars_per_s=price / 3600.0,
            like=None if known is None else known.group.seats[life],
        )

    def _join(self, seat: Seat, standing: Standing) -> None:
        key = key_of(seat.beat)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key, self.policy.weights)
            self._index(key[0])
        group.seats[seat.life] = seat
        group.stale = True
        self._by_life[seat.life] = _Member(group, standing, seat.beat)

    def _leave(self, group: Group, life: Incarnation) -> None:
        del group.seats[life]
        group.stale = True
        if not group.seats:
            del self._groups[group.key]
            self._index(group.key[0])

    def _index(self, model: str) -> None:
        found = tuple(self._groups[key] for key in sorted(self._groups) if key[0] == model)
        if found:
            self._by_model[model] = found
        else:
            self._by_model.pop(model, None)

    def _clear_residents(self, life: Incarnation, pending: Pending) -> None:
        if not pending.sequences:
            self._residents.clear(life)
