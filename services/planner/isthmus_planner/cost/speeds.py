"""What a request will cost on live workers: by what was learned of their steps, else by the means that they report,
else by defaults."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_planner.cost.online import LiveCosts, StepCosts
from isthmus_shared.messages.health import WorkerHeartbeat
from isthmus_shared.messages.route import Prediction

LEARNED_STEPS = 8
"""Steps of a kind from which on the estimate is preferred to a worker's own mean."""


@dataclass(frozen=True, slots=True)
class CostConstants:
    """Defaults until a worker has reported its own; deliberately slow, so that no deadline is drawn too tight."""

    prefill_tokens_per_s: float = 2000.0
    decode_step_s: float = 0.02
    decode_step_per_sequence_s: float = 0.0005
    """What one more sequence adds to everyone's step."""
    decode_step_per_kv_token_s: float = 1e-6
    """What one more token in the cache adds to it."""
    crossing_base_s: float = 0.005
    crossing_tokens_per_s: float = 50_000.0
    """KV of so many prompt tokens crosses per second."""
    spread_calibrated: float = 1.5
    """p90 over p50 when both rates were measured."""
    spread_default: float = 3.0
    """The same when they are guesses."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Work routed to a worker since its last beat, which therefore does not show it yet."""

    prefill_tokens: int = 0
    sequences: int = 0
    kv_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Side:
    """One worker as one request sees it."""

    worker: WorkerHeartbeat
    pending: Pending
    live: LiveCosts | None = None
    """None: it has told of no step yet."""

    @property
    def learned_prefill(self) -> LiveCosts | None:
        return self.live if self.live is not None and self.live.prefill_seen >= LEARNED_STEPS else None

    @property
    def learned_decode(self) -> LiveCosts | None:
        return self.live if self.live is not None and self.live.decode_seen >= LEARNED_STEPS else None

    @property
    def kv_tokens(self) -> int:
        load = self.worker.load
        return (load.kv_blocks_total - load.kv_blocks_free + self.pending.kv_blocks) * self.worker.kv_block_tokens


def prior_costs(constants: CostConstants) -> StepCosts:
    """Where an estimate of a worker begins."""
    return StepCosts(
        base_s=constants.decode_step_s,
        per_sequence_s=constants.decode_step_per_sequence_s,
        per_kv_token_s=constants.decode_step_per_kv_token_s,
        per_prefill_token_s=1.0 / constants.prefill_tokens_per_s,
    )


def queue_wait_s(side: Side, constants: CostConstants) -> float:
    """Until the prefill of a request that arrives now begins."""
    return _prefill_s(side, side.worker.load.queued_prefill_tokens + side.pending.prefill_tokens, constants)


def _prefill_s(side: Side, tokens: int, constants: CostConstants) -> float:
    live = side.learned_prefill
    if live is None:
        return tokens / (side.worker.load.prefill_tokens_per_s or constants.prefill_tokens_per_s)
    return live.prefill_s(tokens, side.worker.load.running, side.kv_tokens)


def crossing_s(isl_tokens: int, constants: CostConstants) -> float:
    return constants.crossing_base_s + isl_tokens / constants.crossing_tokens_per_s


def decode_itl_s(side: Side, isl_tokens: int, constants: CostConstants) -> float:
    """Inter-token latency of everyone on that worker once one more sequence has joined, with its prompt's KV."""
    load, live = side.worker.load, side.learned_decode
    joining = 1 + side.pending.sequences + load.loading
    if live is not None:
        return live.costs.step_s(load.running + joining, side.kv_tokens + isl_tokens)
    step_s = load.decode_step_s or (constants.decode_step_s + constants.decode_step_per_sequence_s * load.running)
    return step_s + constants.decode_step_per_sequence_s * joining


def predict(prefill: Side, decode: Side, isl_tokens: int, constants: CostConstants) -> Prediction:
    """TTFT is prefill's own (the first token does not wait for the crossing); ITL is decode's."""
    ttft_s = queue_wait_s(prefill, constants) + _prefill_s(prefill, isl_tokens, constants)
    itl_s = decode_itl_s(decode, isl_tokens, constants)
    told_prefill = prefill.learned_prefill or prefill.worker.load.prefill_tokens_per_s
    told_decode = decode.learned_decode or decode.worker.load.decode_step_s
    calibrated = bool(told_prefill and told_decode)
    least = constants.spread_calibrated if calibrated else constants.spread_default
    return Prediction(
        ttft_p50_s=ttft_s,
        ttft_p90_s=ttft_s * _spread(prefill.learned_prefill, least),
        itl_p50_s=itl_s,
        itl_p90_s=itl_s * _spread(decode.learned_decode, least),
        calibrated=calibrated,
    )


def _spread(live: LiveCosts | None, least: float) -> float:
    """A step's own scatter where it is known, but never less than what requests differ by."""
    return least if live is None else max(least, live.spread)
