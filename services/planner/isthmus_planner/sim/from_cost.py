"""The cost model's laws as the simulator's tables."""

from __future__ import annotations

from isthmus_planner.cost.laws import DecodeLaw, PrefillLaw
from isthmus_planner.sim.hardware import DecodeTable, PrefillTable


def decode_table(law: DecodeLaw, max_batch: int) -> DecodeTable:
    """The same figures: a table is the law at every batch size."""
    return DecodeTable(tuple(float(law.a_s(batch)) for batch in range(1, max_batch + 1)), law.b_s_per_token)


def prefill_table(law: PrefillLaw) -> PrefillTable:
    """The same but for prompts of a few tokens: each token sees a full sliding window, and a pass reads all experts."""
    return PrefillTable(
        base_s=law.base_s,
        token_s=law.linear_s + law.window_s * law.window_tokens,
        pair_s=law.full_s,
        floor_s=law.dense_read_s + law.experts_read_s,
        extra_token_s=law.token_s,
    )
