"""The seats of many workers as columns, so that a request is scored for all of them in a few passes.

What is computed here is defined by `routing.scorers`; a pass over a list costs some 0.2 µs a worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from isthmus_planner.routing.ask import Ask
from isthmus_planner.routing.policy import Weights
from isthmus_planner.routing.scorers.residents import SHARED
from isthmus_planner.routing.seat import Seat
from isthmus_shared.ids import Incarnation, NodeId

NEVER = math.inf


class Columns:
    """Seats in the order of their workers' names; `standing` of them changes only with `Group.rebuild`."""

    __slots__ = ("index", "least_limit", "limits", "nodes", "seats")

    def __init__(self, seats: Sequence[Seat]) -> None:
        self.seats = list(seats)
        self.index: dict[Incarnation, int] = {seat.life: i for i, seat in enumerate(seats)}
        self.nodes: dict[NodeId, list[int]] = {}
        for i, seat in enumerate(seats):
            self.nodes.setdefault(seat.beat.node_id, []).append(i)
        self.limits = [limit_tokens(seat) for seat in seats]
        """Longest prompt that the worker could ever take."""
        self.least_limit = min(self.limits, default=0)

    def strike(self, costs: list[float], tokens: int, excluded: Sequence[Incarnation]) -> None:
        """Takes out whoever may not serve the request."""
        if tokens > self.least_limit:
            for i, limit in enumerate(self.limits):
                if tokens > limit:
                    costs[i] = NEVER
        for life in excluded:
            at = self.index.get(life)
            if at is not None:
                costs[at] = NEVER


class PrefillColumns(Columns):
    """What it costs to prefill on each: `wait + (n·token + ⌈n/chunk⌉·chunk_s)·factor + load`."""

    __slots__ = ("_base", "_chunk", "_chunk_s", "_factor", "_load", "_ready", "_token", "_weights", "out", "staging")

    def __init__(self, seats: Sequence[Seat], weights: Weights) -> None:
        super().__init__(seats)
        blank = [0.0] * len(seats)
        self._weights = weights
        self._ready, self._token, self._chunk_s, self._factor = (blank.copy() for _ in range(4))
        self._base, self._load = blank.copy(), blank.copy()
        self._chunk = [1] * len(seats)
        self.out = blank.copy()
        """Seconds per byte that leaves the worker's node."""
        self.staging = [NEVER] * len(seats)
        """Bytes free in the node's staging pool."""
        for i, seat in enumerate(seats):
            self.put(i, seat)

    def put(self, i: int, seat: Seat) -> None:
        weights = self._weights
        self.seats[i] = seat
        self._ready[i], self._token[i] = seat.ready_s, seat.token_s
        self._chunk[i], self._chunk_s[i] = seat.chunk_tokens, seat.chunk_s
        self._factor[i] = 1.0 + weights.residents * seat.residents + weights.dollar_s * seat.dollars_per_s
        self._base[i], self._load[i] = seat.base_s, weights.load_s * seat.load

    def costs(self, ask: Ask) -> list[float]:
        """ttft + residents (by prefill) + price + load, and the TTFT target, for each."""
        n = ask.tokens
        if n <= 0:
            return []
        now_s = ask.now_s
        waits = [b + r - now_s if r > now_s else b for b, r in zip(self._base, self._ready, strict=True)]
        found = [
            w + (n * t - (-n // c) * s) * f + e
            for w, t, c, s, f, e in zip(
                waits, self._token, self._chunk, self._chunk_s, self._factor, self._load, strict=True
            )
        ]
        left_s = ask.ttft_left_s
        if left_s is not None:
            missed_s, excess, margin = ask.weights.missed_s, ask.weights.excess, ask.margin
            found = [
                cost if (o := margin * (w + n * t - (-n // c) * s) - left_s) <= 0.0 else cost + missed_s + excess * o
                for cost, w, t, c, s in zip(found, waits, self._token, self._chunk, self._chunk_s, strict=True)
            ]
        for life in ask.cached:
            at = self.index.get(life)
            if at is not None:
                found[at] = self._one(ask, at, ask.new_tokens(life))
        return found

    def first_s(self, ask: Ask) -> list[float]:
        """Until the prompt is done on each."""
        n, now_s = ask.tokens, ask.now_s
        found = [
            b + (r - now_s if r > now_s else 0.0) + n * t - (-n // c) * s
            for b, r, t, c, s in zip(self._base, self._ready, self._token, self._chunk, self._chunk_s, strict=True)
        ]
        for life in ask.cached:
            at = self.index.get(life)
            if at is not None:
                seat = self.seats[at]
                found[at] = seat.base_s + seat.wait_s(now_s) + seat.prefill_s(ask.new_tokens(life))
        return found

    def _one(self, ask: Ask, i: int, tokens: int) -> float:
        seat = self.seats[i]
        own_s, wait_s = seat.prefill_s(tokens), seat.base_s + seat.wait_s(ask.now_s)
        cost = wait_s + own_s * self._factor[i] + self._load[i]
        if ask.ttft_left_s is not None:
            over = ask.margin * (wait_s + own_s) - ask.ttft_left_s
            if over > 0.0:
                cost += ask.weights.missed_s + ask.weights.excess * over
        return cost


class DecodeColumns(Columns):
    """What it costs to decode on each: `osl·(rate + n·rate_per_token) + load`, and room, and ITL targets."""

    __slots__ = ("_count", "_free", "_held", "_itl", "_kv", "_load", "_per", "_rate", "_strict", "_weights", "inn")

    def __init__(self, seats: Sequence[Seat], weights: Weights) -> None:
        super().__init__(seats)
        blank = [0.0] * len(seats)
        self._weights = weights
        self._rate, self._per, self._load, self._held, self._itl, self._kv = (blank.copy() for _ in range(6))
        self._free = [0] * len(seats)
        self._strict = [NEVER] * len(seats)
        self._count = [0] * len(seats)
        self.inn = blank.copy()
        """Seconds per byte that comes to the worker's node."""
        for i, seat in enumerate(seats):
            self.put(i, seat)

    def put(self, i: int, seat: Seat) -> None:
        weights = self._weights
        self.seats[i] = seat
        own = weights.itl + weights.dollar_s * seat.dollars_per_s / (seat.residents + 1)
        others = weights.residents * SHARED * seat.residents
        self._rate[i] = own * seat.itl_s + others * seat.sequence_s
        self._per[i] = (own + others) * seat.kv_token_s
        self._load[i] = weights.load_s * seat.load
        self._held[i] = seat.ready_s if seat.beat.relay is not None else NEVER
        self._free[i] = seat.free_tokens
        self._itl[i], self._kv[i] = seat.itl_s, seat.kv_token_s
        self._strict[i], self._count[i] = seat.targets.strictest_s, seat.targets.count

    def pair_costs(self, ask: Ask) -> list[float]:
        """itl + residents (by joining) + held_up + price + room + load and the ITL targets without the crossing."""
        n, osl, room_s, now_s = ask.tokens, ask.osl_tokens, ask.weights.room_s, ask.now_s
        held = [h - now_s if h > now_s else 0.0 for h in self._held]
        found = [
            osl * (r + n * p) + (e + h if n < f else e + h + room_s)
            for r, p, e, h, f in zip(self._rate, self._per, self._load, held, self._free, strict=True)
        ]
        return self._with_targets(ask, found, held, own=True)

    def alone_costs(self, ask: Ask, first_s: Sequence[float]) -> list[float]:
        """The same without what only a pair has (`held_up`) and without load, which the prefill side counts.

        `first_s`: until its prompt is done on each; so long those who are there are held up.
        """
        n, osl, room_s = ask.tokens, ask.osl_tokens, ask.weights.room_s
        found = [
            osl * (r + n * p) + (0.0 if n < f else room_s)
            for r, p, f in zip(self._rate, self._per, self._free, strict=True)
        ]
        return self._with_targets(ask, found, first_s, own=False)

    def _with_targets(self, ask: Ask, costs: list[float], held_s: Sequence[float], *, own: bool) -> list[float]:
        """`own`: whether the request's own decoding is held up as well."""
        n, margin, share = ask.tokens, ask.margin, 1.0 / ask.osl_tokens
        missed_s, excess = ask.weights.missed_s, ask.weights.excess * ask.osl_tokens
        target_s = ask.itl_target_s
        if target_s is not None:
            mine = share if own else 0.0
            costs = [
                c
                if (o := margin * (i + n * k + (h * mine if h < NEVER else 0.0)) - target_s) <= 0.0
                else c + missed_s + excess * o
                for c, i, k, h in zip(costs, self._itl, self._kv, held_s, strict=True)
            ]
        if any(self._count):
            shared = SHARED * excess
            costs = [
                c
                if (o := margin * (i + n * k + (h * share if h < NEVER else 0.0)) - t) <= 0.0
                else c + count * (missed_s + shared * o)
                for c, i, k, h, t, count in zip(
                    costs, self._itl, self._kv, held_s, self._strict, self._count, strict=True
                )
            ]
        return costs


def limit_tokens(seat: Seat) -> int:
    """Longest prompt that it could take with an empty cache: one token of output must fit as well."""
    beat = seat.beat
    return min(beat.max_model_len_tokens, beat.load.kv_blocks_total * beat.kv_block_tokens) - 1
