"""Accelerators and models as the laws need them. Pure: `catalog` reads the files, `hf_config` a model's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from isthmus_planner.cost.layout import Layout, Precision
from isthmus_shared.errors import ConfigInvalid

WIDER: Mapping[Precision, Precision | None] = {
    # Where a format's arithmetic is missing, weights are unpacked into bf16; fp8 pipelines for fp4 weights are rare.
    Precision.FP4: Precision.BF16,
    Precision.FP8: Precision.BF16,
    Precision.BF16: None,
}


@dataclass(frozen=True, slots=True)
class AcceleratorProfile:
    """One device (or, for `Groq 3 LPX`, one rack) by its data sheet. Rates are dense. None: not published.

    A figure is read with `need`, which refuses clearly when it is unknown, so a profile with gaps serves whatever
    does not depend on them.
    """

    name: str
    title: str
    vendor: str
    formats: tuple[Precision, ...]
    """Formats that its matrix units have, whether or not the rate is known."""
    bf16_flop_per_s: float | None = None
    fp8_flop_per_s: float | None = None
    fp4_flop_per_s: float | None = None
    memory_bytes: float | None = None
    memory_bytes_per_s: float | None = None
    scale_up_bytes_per_s: float | None = None
    """To its peers in the node, one direction."""
    nic_bits_per_s: float | None = None
    """Its share of the node's network cards, one direction."""
    power_w: float | None = None
    price_usd_per_h: float | None = None
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    """Per figure: where it comes from, or why it is missing."""

    def __post_init__(self) -> None:
        for name in FIGURES:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigInvalid(
                    f"accelerator {self.name!r} has {name} = {value:g}",
                    todo="give a positive number, or null when it is unknown",
                    param=name,
                )

    def need(self, figure: str, purpose: str) -> float:
        """The figure's value. Raises `ConfigInvalid` when it is unknown, saying what cannot be done without it."""
        value: float | None = getattr(self, figure)
        if value is None:
            why = self.sources.get(figure, "")
            raise ConfigInvalid(
                f"{purpose} needs {figure} of accelerator {self.name!r}, which is unknown"
                + (f" ({why})" if why else ""),
                todo=f"put its {figure} into a profile of your own, or choose an accelerator where it is known",
                param=figure,
            )
        return value

    def arithmetic(self, weights: Precision) -> Precision:
        """The format that arithmetic on such weights runs in here."""
        wanted: Precision | None = weights
        while wanted is not None and wanted not in self.formats:
            wanted = WIDER[wanted]
        if wanted is None:
            raise ConfigInvalid(f"accelerator {self.name!r} has arithmetic in none of {weights} and wider formats")
        return wanted

    def peak_flop_per_s(self, weights: Precision) -> float:
        return self.need(f"{self.arithmetic(weights)}_flop_per_s", f"prefill with {weights} weights")


FIGURES = tuple(f.name for f in fields(AcceleratorProfile) if f.type == "float | None")


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention: one latent and one rotary key per token and layer, shared by all heads."""

    latent_dim: int
    rope_dim: int
    qk_dim: int
    """Of one head's query and key when computed (not absorbed), rotary part included."""
    v_dim: int


@dataclass(frozen=True, slots=True)
class WeightBits:
    dense: float
    experts: float


@dataclass(frozen=True, slots=True)
class ModelProfile:
    name: str
    full_layers: int
    """Layers whose attention sees the whole context."""
    window_layers: int
    window_tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    """Routed experts per MoE layer; 0: none."""
    experts_per_token: int
    dense_params: float
    """Read for every token: attention, norms, routers, shared experts, unembedding."""
    expert_params: float
    """All routed experts of all layers."""
    embedding_params: float
    """The input table, stored but not read through; 0 where it is tied to the unembedding."""
    precision: Precision
    """As published."""
    bits: Mapping[Precision, WeightBits]
    mla: Mla | None = None
    max_context_tokens: int | None = None
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive = ("hidden", "heads", "kv_heads", "head_dim", "dense_params")
        bad = [name for name in positive if not getattr(self, name) > 0]
        if self.layers < 1:
            bad.append("layers")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            bad.append("experts_per_token")
        if self.window_layers and self.window_tokens < 1:
            bad.append("window_tokens")
        if bad:
            raise ConfigInvalid(
                f"model {self.name!r} has no sensible {', '.join(bad)}", todo="correct its profile", param=bad[0]
            )

    @property
    def layers(self) -> int:
        return self.full_layers + self.window_layers

    @property
    def params(self) -> float:
        return self.dense_params + self.expert_params + self.embedding_params

    @property
    def active_expert_params(self) -> float:
        return self.expert_params * self.experts_per_token / self.experts if self.experts else 0.0

    @property
    def active_params(self) -> float:
        """Multiplied with every token; the input table is only looked up."""
        return self.dense_params + self.active_expert_params

    @property
    def attention_flops(self) -> float:
        """Of one token against one token of context in one layer: scores and weighted sum, all heads."""
        qk_dim, v_dim = (self.head_dim, self.head_dim) if self.mla is None else (self.mla.qk_dim, self.mla.v_dim)
        return 2.0 * self.heads * (qk_dim + v_dim)

    def weight_precision(self, layout: Layout) -> Precision:
        return layout.weights or self.precision

    def weight_bits(self, layout: Layout) -> WeightBits:
        precision = self.weight_precision(layout)
        if precision not in self.bits:
            known = ", ".join(sorted(self.bits))
            raise ConfigInvalid(
                f"model {self.name!r} in {precision}", why="its profile has no such weights", todo=f"it has {known}"
            )
        return self.bits[precision]

    def dense_bytes(self, layout: Layout) -> float:
        """Read in every step."""
        return self.dense_params * self.weight_bits(layout).dense / 8

    def expert_bytes(self, layout: Layout) -> float:
        """Of all routed experts; a step reads the part that its tokens touch."""
        return self.expert_params * self.weight_bits(layout).experts / 8

    def stored_bytes(self, layout: Layout) -> float:
        """One whole copy in memory, the input table included."""
        bits = self.weight_bits(layout)
        return self.dense_bytes(layout) + self.expert_bytes(layout) + self.embedding_params * bits.dense / 8
