"""One worker as a route sees it: what its heartbeat, its learned costs and what was routed to it since amount to.

For a prompt of n new tokens its costs are straight lines in n, up to the rounding to chunks:

    prefill     base_s + wait_s(now) + n · token_s + ⌈n / chunk_tokens⌉ · chunk_s
    ITL         itl_s + n · kv_token_s        of everyone, once the request has joined

A seat is never changed: a beat or an assignment puts another in its place, so that an explanation can keep it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus_planner.cost.online import LiveCosts
from isthmus_planner.cost.speeds import CostConstants, Pending, Side, decode_itl_s, queue_wait_s
from isthmus_planner.registry import ref_of
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.health import Role, WorkerHeartbeat
from isthmus_shared.messages.work import WorkerRef

NO_CHUNK = 1 << 30
"""Where no step has been learned, a prompt is one chunk that costs nothing by itself."""
NO_PENDING = Pending()
MOST_PREFILL_SHARE = 0.9
"""Of a decode worker's time: the rest is left for decoding in the worst case, since steps with prompts decode too."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Actual over predicted, of a worker that drifts: its costs are taken so many times."""

    ttft: float = 1.0
    itl: float = 1.0
    ttft_base_s: float = 0.0
    """What comes on top of any prompt's steps: an engine's front end, the bus."""


UNCORRECTED = Correction()


@dataclass(frozen=True, slots=True)
class Targets:
    """ITL targets of those who were routed to a worker."""

    strictest_s: float = math.inf
    count: int = 0
    """With any target."""


NO_TARGETS = Targets()


@dataclass(slots=True)
class Seat:
    """Not frozen only because one is made for each route and beat, and a frozen one takes four times as long."""

    beat: WorkerHeartbeat
    """The first with this standing (`group.standing_of`), so that many seats that are kept keep one: only what does not
    change within it is read, never its load."""
    ref: WorkerRef
    pending: Pending
    targets: Targets
    ready_s: float
    """When the prompts that it has now are done, by prediction."""
    base_s: float
    """Of the time to a first token, beside steps and queue."""
    token_s: float
    chunk_tokens: int
    chunk_s: float
    prefill_spread: float
    """p90 over p50."""
    prefill_told: bool
    """Whether its costs are the worker's own and no defaults."""
    itl_s: float
    """With the share of its time that prompts have taken lately."""
    sequence_s: float
    """What the joining sequence adds by itself; in `itl_s` already."""
    kv_token_s: float
    decode_spread: float
    decode_told: bool
    residents: int
    """Sequences that decode there, or are about to."""
    free_tokens: int
    """Room for KV."""
    load: int
    dollars_per_s: float

    @property
    def life(self) -> Incarnation:
        return self.beat.incarnation

    def wait_s(self, now_s: float) -> float:
        """Until the prefill of a request that comes now begins."""
        return self.ready_s - now_s if self.ready_s > now_s else 0.0

    def prefill_s(self, tokens: int) -> float:
        """Of so many prompt tokens, once their turn has come."""
        return tokens * self.token_s + -(-tokens // self.chunk_tokens) * self.chunk_s

    def queue_s(self, tokens: int) -> float:
        """What so many prompt tokens add to the queue: chunks are shared between prompts there."""
        return tokens * (self.token_s + self.chunk_s / self.chunk_tokens)

    def itl_with_s(self, tokens: int) -> float:
        return self.itl_s + tokens * self.kv_token_s


def seat_of(
    beat: WorkerHeartbeat,
    constants: CostConstants,
    *,
    now_s: float = 0.0,
    ready_s: float | None = None,
    live: LiveCosts | None = None,
    pending: Pending = NO_PENDING,
    targets: Targets = NO_TARGETS,
    correction: Correction = UNCORRECTED,
    dollars_per_s: float = 0.0,
    like: Seat | None = None,
) -> Seat:
    """`now_s`: when the beat came. `ready_s`: what is known of its queue since then; None: it is as the beat tells.
    `like`: the same worker's last one, with the same standing."""
    side = Side(beat, pending, live)
    load = beat.load
    decodes = Role.DECODE in beat.roles
    prefill, decode = side.learned_prefill, side.learned_decode
    if prefill is None:
        token_s = 1.0 / (load.prefill_tokens_per_s or constants.prefill_tokens_per_s)
        chunk_tokens, chunk_s = NO_CHUNK, 0.0
    else:
        token_s = prefill.costs.per_prefill_token_s
        chunk_tokens, chunk_s = max(prefill.chunk_tokens, 1), prefill.costs.step_s(load.running, side.kv_tokens)
    if decode is None:
        sequence_s, kv_token_s = constants.decode_step_per_sequence_s, 0.0
    else:
        sequence_s, kv_token_s = decode.costs.per_sequence_s, decode.costs.per_kv_token_s
    told_prefill = prefill is not None or bool(load.prefill_tokens_per_s)
    told_decode = decode is not None or bool(load.decode_step_s)
    share = 0.0 if live is None or not decodes else min(live.prefill_share, MOST_PREFILL_SHARE)
    slower, later = correction.ttft, correction.itl / (1.0 - share)
    return Seat(
        beat=beat if like is None else like.beat,
        ref=ref_of(beat) if like is None else like.ref,
        pending=pending,
        targets=targets,
        ready_s=now_s + slower * queue_wait_s(side, constants) if ready_s is None else ready_s,
        base_s=correction.ttft_base_s,
        token_s=slower * token_s,
        chunk_tokens=chunk_tokens,
        chunk_s=slower * chunk_s,
        prefill_spread=_spread(prefill, told=told_prefill, constants=constants),
        prefill_told=told_prefill,
        itl_s=later * decode_itl_s(side, 0, constants),
        sequence_s=later * sequence_s,
        kv_token_s=later * kv_token_s,
        decode_spread=_spread(decode, told=told_decode, constants=constants),
        decode_told=told_decode,
        residents=load.running + load.loading + pending.sequences if decodes else 0,
        free_tokens=(load.kv_blocks_free - pending.kv_blocks) * beat.kv_block_tokens,
        load=load.running + load.waiting + load.loading + pending.sequences,
        dollars_per_s=dollars_per_s,
    )


def _spread(live: LiveCosts | None, *, told: bool, constants: CostConstants) -> float:
    """A step's own scatter where it is known, but never less than what requests differ by."""
    least = constants.spread_calibrated if told else constants.spread_default
    return least if live is None else max(least, live.spread)
