"""Times from profiles, layout and constants: prefill, one decode step, one transfer. Pure; arrays go through.

A law holds plain numbers, so a simulator may also make one by hand. Arguments may be floats or NumPy arrays of one
shape; the answer has that shape. Sources of the formulas: docs/cost-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from isthmus_planner.cost import kv
from isthmus_planner.cost.constants import Constants
from isthmus_planner.cost.layout import Layout
from isthmus_planner.cost.profiles import AcceleratorProfile, ModelProfile
from isthmus_shared.errors import ConfigInvalid

Real: TypeAlias = Any
"""A float, or a NumPy array of them: then the answer is an array of the same shape."""
ACTIVATION_BYTES = 2.0
"""Activations travel between ranks in bf16."""
ALL_REDUCES_PER_LAYER = 2
"""After attention and after the feed-forward block."""


def experts_touched(batch: Real, experts: int, experts_per_token: int, skew: float = 1.0) -> Real:
    """How many of `experts` a layer reads for `batch` tokens (≥ 1).

    The first token takes k of E; each further one misses a given expert with 1 - k/E, and with routing skew counts
    as `skew` of a token: E (1 - (1 - k/E) ^ (1 + (B - 1) s)).
    """
    if not experts:
        return 0.0 * batch
    missed = 1.0 - experts_per_token / experts
    return experts * (1.0 - missed ** (1.0 + (batch - 1.0) * skew))


@dataclass(frozen=True, slots=True)
class DecodeLaw:
    """One step of `batch` sequences that hold `kv_tokens` in all: a(B) + b K. Seconds."""

    fixed_s: float
    """Launches and latencies of all layers, and the weights that every step reads."""
    experts_s: float
    """Reading every routed expert of every layer once."""
    experts: int
    experts_per_token: int
    skew: float
    sequence_s: float
    """Of one more sequence, its windowed layers' KV included."""
    b_s_per_token: float
    """Of one more token of context, anywhere in the batch."""

    def a_s(self, batch: Real) -> Real:
        """The step's part that does not depend on context. `batch` ≥ 1."""
        touched = experts_touched(batch, self.experts, self.experts_per_token, self.skew)
        share = touched / self.experts if self.experts else 0.0
        return self.fixed_s + self.experts_s * share + self.sequence_s * batch

    def step_s(self, batch: Real, kv_tokens: Real) -> Real:
        return self.a_s(batch) + self.b_s_per_token * kv_tokens

    def run_s(self, batch: Real, kv_tokens: Real, steps: Real) -> Real:
        """`steps` steps of an unchanging batch that begins with `kv_tokens`; every step adds one token a sequence."""
        grown = steps * kv_tokens + batch * steps * (steps - 1) / 2
        return steps * self.a_s(batch) + self.b_s_per_token * grown


@dataclass(frozen=True, slots=True)
class PrefillLaw:
    """One prompt of `new_tokens` behind `cached_tokens` that need no work. Seconds."""

    base_s: float
    linear_s: float
    """Of one new token's matrix products, wherever it stands."""
    full_s: float
    """Of one new token's attention to one token of context, all layers that see everything."""
    window_s: float
    """The same of the windowed layers."""
    window_tokens: int
    dense_read_s: float
    experts_read_s: float
    experts: int
    experts_per_token: int
    skew: float
    token_s: float
    """Collectives and whatever else does not shrink with more accelerators, per new token."""

    def time_s(self, new_tokens: Real, cached_tokens: Real = 0.0) -> Real:
        """0 new tokens cost nothing."""
        return (new_tokens > 0) * (self.base_s + self.work_s(new_tokens, cached_tokens))

    def work_s(self, new_tokens: Real, cached_tokens: Real = 0.0) -> Real:
        """Without the fixed part: what stands in the way of others on the same accelerators."""
        compute_s = self._compute_s(new_tokens, cached_tokens)
        touched = experts_touched(_at_least_one(new_tokens), self.experts, self.experts_per_token, self.skew)
        read_s = self.dense_read_s + (self.experts_read_s * touched / self.experts if self.experts else 0.0)
        return _larger(compute_s, read_s) + new_tokens * self.token_s

    def tokens_per_s(self, new_tokens: Real, cached_tokens: Real = 0.0) -> Real:
        return new_tokens / self.time_s(new_tokens, cached_tokens)

    def _compute_s(self, new_tokens: Real, cached_tokens: Real) -> Real:
        full_context = new_tokens * (cached_tokens + new_tokens / 2)
        # Σ min(context, window): a triangle until the window is full, then a strip.
        growing = _smaller(new_tokens, _larger(self.window_tokens - cached_tokens, 0.0))
        windowed = growing * (cached_tokens + growing / 2) + (new_tokens - growing) * self.window_tokens
        return new_tokens * self.linear_s + full_context * self.full_s + windowed * self.window_s


@dataclass(frozen=True, slots=True)
class TransferLaw:
    """KV from one node to another: setup, then the slower of posting descriptors and moving bytes."""

    setup_s: float
    descriptor_s: float
    bytes_per_s: float
    """The least of wire, host memory and the pace that is allowed."""

    def __post_init__(self) -> None:
        if not (self.setup_s >= 0 and self.descriptor_s >= 0 and self.bytes_per_s > 0):
            raise ConfigInvalid(
                f"a transfer at {self.bytes_per_s:g} B/s, {self.setup_s:g} s setup, {self.descriptor_s:g} s each",
                todo="the rate is positive, the times are 0 or more",
            )

    def time_s(self, kv_bytes: Real, descriptors: Real = 1.0) -> Real:
        return self.setup_s + _larger(descriptors * self.descriptor_s, kv_bytes / self.bytes_per_s)

    def queued_s(self, kv_bytes: float, descriptors: float, transfers_per_s: float) -> float:
        """With the wait behind others of the same size that arrive at random (M/D/1). `inf` at or above capacity."""
        service_s = float(self.time_s(kv_bytes, descriptors))
        load = transfers_per_s * service_s
        return service_s * (1 + load / (2 * (1 - load))) if load < 1 else float("inf")


def decode_law(accelerator: AcceleratorProfile, model: ModelProfile, layout: Layout, constants: Constants) -> DecodeLaw:
    """Raises `ConfigInvalid` when a figure that it takes is unknown."""
    rate = accelerator.need("memory_bytes_per_s", "a decode step")
    weights_rate, kv_rate = rate * constants.weight_efficiency, rate * constants.kv_efficiency
    # With dp groups a step takes as long as one group's, which holds 1/dp of sequences and of their context.
    per_kv_byte_s = 1.0 / (kv.shard(model, layout) * kv_rate * layout.dp)
    window_s = kv.window_bytes_per_sequence(model, layout) * per_kv_byte_s
    return DecodeLaw(
        fixed_s=model.layers * constants.layer_s + model.dense_bytes(layout) / (layout.tp * weights_rate),
        experts_s=model.expert_bytes(layout) / (layout.accelerators * weights_rate),
        experts=model.experts,
        experts_per_token=model.experts_per_token,
        skew=constants.skew,
        sequence_s=constants.sequence_s / layout.dp + window_s,
        b_s_per_token=kv.full_bytes_per_token(model, layout) * per_kv_byte_s,
    )


def prefill_law(
    accelerator: AcceleratorProfile, model: ModelProfile, layout: Layout, constants: Constants
) -> PrefillLaw:
    """Raises `ConfigInvalid` when a figure that it takes is unknown: scale-up bandwidth only where tp > 1."""
    flop_per_s = accelerator.peak_flop_per_s(model.weight_precision(layout)) * constants.prefill_efficiency
    group = layout.tp * flop_per_s
    weights_rate = accelerator.need("memory_bytes_per_s", "prefill") * constants.weight_efficiency
    experts_s = 2 * model.active_expert_params / (layout.accelerators * flop_per_s)
    linear_s = 2 * model.dense_params / group + experts_s
    return PrefillLaw(
        base_s=constants.prefill_base_s,
        linear_s=linear_s,
        full_s=model.attention_flops * model.full_layers / group,
        window_s=model.attention_flops * model.window_layers / group,
        window_tokens=model.window_tokens,
        dense_read_s=model.dense_bytes(layout) / (layout.tp * weights_rate),
        experts_read_s=model.expert_bytes(layout) / (layout.accelerators * weights_rate),
        experts=model.experts,
        experts_per_token=model.experts_per_token,
        skew=constants.skew,
        token_s=constants.prefill_token_s + collective_s_per_token(accelerator, model, layout),
    )


def collective_s_per_token(accelerator: AcceleratorProfile, model: ModelProfile, layout: Layout) -> float:
    """Ring all-reduces of one token's activations over the group: each rank sends 2 (tp - 1) / tp of them."""
    if layout.tp == 1:
        return 0.0
    rate = accelerator.need("scale_up_bytes_per_s", f"prefill over tp = {layout.tp}")
    reduced = ALL_REDUCES_PER_LAYER * model.layers * model.hidden * ACTIVATION_BYTES
    return reduced * 2 * (layout.tp - 1) / layout.tp / rate


def transfer_law(
    sender: AcceleratorProfile,
    receiver: AcceleratorProfile,
    *,
    nics: int,
    host_bytes_per_s: float = float("inf"),
    pace_bytes_per_s: float = float("inf"),
    setup_s: float = 0.0,
    descriptor_s: float = 0.0,
) -> TransferLaw:
    """Over `nics` network cards on each side. Raises `ConfigInvalid` when a card's rate is unknown."""
    wire = min(end.need("nic_bits_per_s", "a transfer") for end in (sender, receiver)) / 8 * nics
    return TransferLaw(setup_s, descriptor_s, min(wire, host_bytes_per_s, pace_bytes_per_s))


def hiding_kv_bytes_per_s(model: ModelProfile, layout: Layout, prefill: PrefillLaw, prompt_tokens: float) -> float:
    """The rate at which a prompt's KV must leave so that the transfer hides behind prefill."""
    return kv.stored_bytes_per_token(model, layout) * float(prefill.tokens_per_s(prompt_tokens))


def _larger(x: Real, y: Real) -> Real:
    """Elementwise maximum, of floats without NumPy."""
    return x * (x >= y) + y * (x < y)


def _smaller(x: Real, y: Real) -> Real:
    return x * (x <= y) + y * (x > y)


def _at_least_one(x: Real) -> Real:
    return _larger(x, 1.0)
