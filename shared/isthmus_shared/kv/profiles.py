"""How vendors' engines keep KV, by name: so that any pair of them can be run and tested on one machine. Torch-free.

Each is what vLLM 0.32 does on that hardware by default (its attention backends' `get_kv_cache_shape` and their layout),
as a dense tensor in the order of memory; `gaudi-128` is what vLLM's Gaudi plugin does.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from isthmus_shared.kv import form as forms
from isthmus_shared.kv.form import CacheForm
from isthmus_shared.kv.manifest import KvDtype


@dataclass(frozen=True, slots=True)
class Profile:
    form: CacheForm
    block_tokens: int
    dtype: KvDtype = KvDtype.BF16


PROFILES = MappingProxyType(
    {
        "nvidia-flash": Profile(CacheForm("b n h (p d)"), 16),
        "nvidia-flashinfer": Profile(forms.CONTENT, 16),
        "amd-aiter": Profile(forms.CONTENT, 32),
        "amd-shuffle": Profile(CacheForm("b (p h d n x) | b (p h n d m)"), 16),
        "cpu": Profile(forms.CPU_ATTN, 128),
        "gaudi-128": Profile(forms.NHD, 128),
    }
)
