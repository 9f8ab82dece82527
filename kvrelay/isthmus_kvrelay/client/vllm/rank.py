"""What the saving and the loading side of one rank share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isthmus_kvrelay.client.vllm.model_layers import LayerSpec, kv_shape
from isthmus_kvrelay.client.vllm.relay_thread import RelayThread
from isthmus_kvrelay.client.vllm.stats import TransferStats
from isthmus_shared.kv.shape import KvShape


@dataclass(slots=True)
class Rank:
    rank: int
    tp_size: int
    layers: tuple[LayerSpec, ...]
    kv_heads_total: int
    relay: RelayThread
    stats: TransferStats
    log: Callable[[str], None]
    staging_wait_s: float
    """For staging to become free, before a prefill's KV is given up."""
    appear_s: float
    """For a transfer that is asked for before the prefill has begun."""
    known: KvShape | None = None

    def shape(self, fingerprint: str) -> KvShape:
        """The whole model's; the scheduler has read its fingerprint."""
        if self.known is None or self.known.model_fingerprint != fingerprint:
            self.known = kv_shape(
                self.layers, fingerprint=fingerprint, tp_size=self.tp_size, kv_heads_total=self.kv_heads_total
            )
        return self.known
