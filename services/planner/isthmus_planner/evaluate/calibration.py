"""How soon predictions are right that began from wrong constants: a simulated cluster under a steady load."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from isthmus_planner.cost.speeds import CostConstants
from isthmus_planner.evaluate.cluster import Record, Request
from isthmus_planner.evaluate.fleet import MIXES, WorkerSpec, capacity_per_s
from isthmus_planner.evaluate.planned import Planner
from isthmus_planner.evaluate.runs import itl_pair, run, ttft_pair
from isthmus_planner.evaluate.workload import TRACES, Timing, read, requests
from isthmus_planner.routing.policy import ModePolicy, Policy
from isthmus_shared.messages.route import Slo

OFF = 3.0
LEARNED_AFTER = 200
"""Requests."""
SHOWN_LOAD = 0.3
"""Queues are short there, so that it is the workers' times that are predicted."""
SHOWN_REQUESTS = 800
TYPICAL_BATCH = (16, 64)
TYPICAL_CONTEXT_TOKENS = 1_500


@dataclass(frozen=True, slots=True)
class Wrong:
    """Each constant of a planner over the right one."""

    base: float
    sequence: float
    kv_token: float
    prefill_token: float

    @property
    def name(self) -> str:
        factors = (self.base, self.sequence, self.kv_token, self.prefill_token)
        return " ".join("x3" if factor > 1 else "/3" for factor in factors)


ALL_WRONG = tuple(Wrong(*factors) for factors in product((OFF, 1 / OFF), repeat=4))
"""Sixteen: each constant three times too large or too small."""


@dataclass(frozen=True, slots=True)
class Learned:
    """Medians over the requests that were routed after so many, and over the first ones."""

    wrong: Wrong
    ttft: float
    """Median of the predicted ones over the median of what happened."""
    itl: float
    first_ttft: float
    first_itl: float


def right_constants(workers: Sequence[WorkerSpec]) -> CostConstants:
    """The workers' laws as straight lines around a typical batch, in the mean of those that decode or prefill."""
    low, high = TYPICAL_BATCH
    context = TYPICAL_CONTEXT_TOKENS
    sequence, kv_token, base, prompt = [], [], [], []
    for worker in workers:
        table, prefill = worker.engine.decode, worker.engine.prefill
        slope = (table.step_s(high, 0) - table.step_s(low, 0)) / (high - low)
        sequence.append(slope)
        kv_token.append(table.b_s_per_token)
        base.append(table.step_s(low, 0) - low * slope)
        prompt.append((prefill.time_s(context) - prefill.base_s) / context)
    return CostConstants(
        prefill_tokens_per_s=1 / statistics.fmean(prompt),
        decode_step_s=statistics.fmean(base),
        decode_step_per_sequence_s=statistics.fmean(sequence),
        decode_step_per_kv_token_s=statistics.fmean(kv_token),
    )


def constants_off(right: CostConstants, wrong: Wrong) -> CostConstants:
    return CostConstants(
        prefill_tokens_per_s=right.prefill_tokens_per_s / wrong.prefill_token,
        decode_step_s=right.decode_step_s * wrong.base,
        decode_step_per_sequence_s=right.decode_step_per_sequence_s * wrong.sequence,
        decode_step_per_kv_token_s=right.decode_step_per_kv_token_s * wrong.kv_token,
    )


def learn_all(folder: Path, seed: int) -> list[Learned]:
    """Every combination, on the first mix and trace. ScenarioError: the trace cannot be read."""
    mix, trace = MIXES[0], replace(TRACES[0], requests=SHOWN_REQUESTS)
    workers, lengths, itl_s = mix.workers(), read(folder, trace), trace.slo.itl_s
    assert itl_s is not None
    bound = capacity_per_s(workers, lengths.mean_isl_tokens, lengths.mean_osl_tokens, itl_s)
    asked = requests(lengths, Timing.STEADY, SHOWN_LOAD * bound, seed)
    return [learn(workers, asked, wrong) for wrong in ALL_WRONG]


def learn(workers: Sequence[WorkerSpec], asked: Sequence[Request], wrong: Wrong) -> Learned:
    constants = constants_off(right_constants(workers), wrong)
    planner = Planner(Policy(mode=ModePolicy.AUTO, constants=constants), admits=False)
    records = run(workers, planner, asked, Slo())
    first, later = records[:LEARNED_AFTER], records[LEARNED_AFTER:]
    return Learned(wrong, _ttft(later), _itl(later), _ttft(first), _itl(first))


def _ttft(records: Sequence[Record]) -> float:
    return _over([pair for record in records if (pair := ttft_pair(record)) is not None])


def _itl(records: Sequence[Record]) -> float:
    return _over([pair for record in records if (pair := itl_pair(record)) is not None])


def _over(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(pair[0] for pair in pairs) / statistics.median(pair[1] for pair in pairs)
