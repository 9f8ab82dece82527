"""What fits: tokens of KV beside the weights, and sequences of a given length."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_planner.cost import kv
from isthmus_planner.cost.layout import Layout
from isthmus_planner.cost.profiles import AcceleratorProfile, ModelProfile
from isthmus_shared.errors import ConfigInvalid

UTILISATION = 0.9
"""Of device memory that an engine takes for weights, activations and KV; engines' usual default."""
RESERVE_BYTES = 2e9
"""Per accelerator: activations, graphs and communication buffers."""


@dataclass(frozen=True, slots=True)
class MemoryFit:
    kv_tokens: float
    """Tokens of KV that one replica (all its accelerators) holds."""
    weight_bytes: float
    """On the fullest accelerator."""

    def max_batch(self, context_tokens: float) -> int:
        """Sequences of that final length at once. 0: not even one."""
        return int(self.kv_tokens // context_tokens)


def fit(
    accelerator: AcceleratorProfile,
    model: ModelProfile,
    layout: Layout,
    *,
    utilisation: float = UTILISATION,
    reserve_bytes: float = RESERVE_BYTES,
) -> MemoryFit:
    """Raises `ConfigInvalid` when the memory's size is unknown or the weights alone do not fit."""
    memory = accelerator.need("memory_bytes", "the memory fit")
    experts = model.expert_bytes(layout)
    shared = model.stored_bytes(layout) - experts
    weights = shared / layout.tp + experts / layout.accelerators
    free = memory * utilisation - reserve_bytes - weights
    if free <= 0:
        raise ConfigInvalid(
            f"model {model.name!r} does not fit on {layout.accelerators} x {accelerator.name}",
            why=f"its weights take {weights / 1e9:.1f} GB of each, of {memory * utilisation / 1e9:.1f} GB usable",
            todo="raise tp (or ep over more accelerators), or store the weights in fewer bits",
        )
    per_token = kv.stored_bytes_per_token(model, layout) / kv.shard(model, layout)
    return MemoryFit(kv_tokens=free / per_token * layout.dp, weight_bytes=weights)
