"""What a request will cost where, as straight lines. Constants are replaced by what the workers report."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_shared.messages.health import WorkerHeartbeat
from isthmus_shared.messages.route import Prediction


@dataclass(frozen=True, slots=True)
class CostConstants:
    """Defaults until a worker has reported its own; deliberately slow, so that no deadline is drawn too tight."""

    prefill_tokens_per_s: float = 2000.0
    decode_step_s: float = 0.02
    decode_step_per_sequence_s: float = 0.0005
    """What one more sequence adds to everyone's step."""
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


def prefill_rate(worker: WorkerHeartbeat, constants: CostConstants) -> float:
    """Prompt tokens per second."""
    return worker.load.prefill_tokens_per_s or constants.prefill_tokens_per_s


def queue_wait_s(worker: WorkerHeartbeat, pending: Pending, constants: CostConstants) -> float:
    """Until the prefill of a request that arrives now begins."""
    return (worker.load.queued_prefill_tokens + pending.prefill_tokens) / prefill_rate(worker, constants)


def prefill_s(worker: WorkerHeartbeat, isl_tokens: int, constants: CostConstants) -> float:
    return isl_tokens / prefill_rate(worker, constants)


def crossing_s(isl_tokens: int, constants: CostConstants) -> float:
    return constants.crossing_base_s + isl_tokens / constants.crossing_tokens_per_s


def decode_itl_s(worker: WorkerHeartbeat, pending: Pending, constants: CostConstants) -> float:
    """Inter-token latency of everyone on that worker once one more sequence has joined."""
    step_s = worker.load.decode_step_s or (
        constants.decode_step_s + constants.decode_step_per_sequence_s * worker.load.running
    )
    return step_s + constants.decode_step_per_sequence_s * (1 + pending.sequences + worker.load.loading)


def is_calibrated(prefill: WorkerHeartbeat, decode: WorkerHeartbeat) -> bool:
    return prefill.load.prefill_tokens_per_s is not None and decode.load.decode_step_s is not None


def predict(
    prefill: tuple[WorkerHeartbeat, Pending],
    decode: tuple[WorkerHeartbeat, Pending],
    isl_tokens: int,
    constants: CostConstants,
) -> Prediction:
    """TTFT is prefill's own (the first token does not wait for the crossing); ITL is decode's."""
    ttft_s = queue_wait_s(*prefill, constants) + prefill_s(prefill[0], isl_tokens, constants)
    itl_s = decode_itl_s(*decode, constants)
    calibrated = is_calibrated(prefill[0], decode[0])
    spread = constants.spread_calibrated if calibrated else constants.spread_default
    return Prediction(
        ttft_p50_s=ttft_s,
        ttft_p90_s=ttft_s * spread,
        itl_p50_s=itl_s,
        itl_p90_s=itl_s * spread,
        calibrated=calibrated,
    )
