"""How one replica of a model lies on its accelerators."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from isthmus_shared.errors import ConfigInvalid


class Precision(StrEnum):
    """Of weights and arithmetic; also of KV (without fp4)."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"


KV_BYTES = {Precision.BF16: 2.0, Precision.FP8: 1.0}
"""Bytes of one KV element."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`tp` ranks share one copy of the attention weights; `dp` such groups each hold sequences of their own.

    Routed experts always lie over all `tp * dp` accelerators: whole experts on each rank where `ep` > 1, a slice of
    every expert where `ep` = 1. "DP attention" on N accelerators is tp = 1, dp = N.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    weights: Precision | None = None
    """None: the precision that the model is published in."""
    kv: Precision = Precision.BF16

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep"):
            if getattr(self, name) < 1:
                raise ConfigInvalid(f"a layout with {name} = {getattr(self, name)}", todo=f"{name} is at least 1")
        if self.ep > self.accelerators:
            raise ConfigInvalid(
                f"a layout with ep = {self.ep} over {self.accelerators} accelerators (tp x dp)",
                todo="ep is at most tp x dp",
            )
        if self.kv not in KV_BYTES:
            raise ConfigInvalid(f"KV in {self.kv}", todo=f"KV is kept in {', '.join(KV_BYTES)}")

    @property
    def accelerators(self) -> int:
        return self.tp * self.dp

    @property
    def kv_element_bytes(self) -> float:
        return KV_BYTES[self.kv]
