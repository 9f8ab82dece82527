"""Which form the cache tensors of vLLM's attention backends have, and which versions of vLLM that was read in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv import form as forms
from isthmus_shared.kv.form import CacheForm

TESTED_VERSIONS = ("0.32", "0.33")
"""Minor versions. With others the connector starts, and says that they are untested."""

_FORMS: Mapping[str, CacheForm] = {
    "CPU_ATTN": forms.CPU_ATTN,
    "FLASH_ATTN": forms.CONTENT,
    "FLASHINFER": forms.CONTENT,
    "TRITON_ATTN": forms.CONTENT,
    "FLEX_ATTENTION": forms.CONTENT,
    "ROCM_AITER_FA": forms.CONTENT,
    "ROCM_AITER_UNIFIED_ATTN": forms.CONTENT,
    "ROCM_ATTN": forms.HEAD_SLOTS,
    "CPU_MLA": forms.MLA_HEAD,
    "FLASHMLA": forms.MLA_HEAD,
    "CUTLASS_MLA": forms.MLA_HEAD,
    "FLASHINFER_MLA": forms.MLA_HEAD,
    "FLASH_ATTN_MLA": forms.MLA_HEAD,
    "TRITON_MLA": forms.MLA_HEAD,
    "ROCM_AITER_MLA": forms.MLA_HEAD,
    "ROCM_AITER_TRITON_MLA": forms.MLA_HEAD,
}
_SHUFFLE_VARIABLE = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"


def form_of(backend: str, environ: Mapping[str, str], *, amx: bool = False) -> CacheForm:
    """The form of a backend's tensors. Raises `ConfigInvalid` for one that is not known to lay out its cache so."""
    if backend == "CPU_ATTN" and amx:
        raise _refuse(backend, "with AMX and bf16 it packs its cache for the tiles", "serve with --dtype float16")
    if backend == "ROCM_AITER_FA" and environ.get(_SHUFFLE_VARIABLE, "0").lower() in ("1", "true"):
        return forms.SHUFFLE
    if backend not in _FORMS:
        raise _refuse(backend, "its cache's form is not known", f"serve with one of {', '.join(sorted(_FORMS))}")
    return _FORMS[backend]


def untested(version: str) -> str | None:
    """What to say at the start about a version that this was not tried with; None for the others."""
    if any(version == known or version.startswith(f"{known}.") for known in TESTED_VERSIONS):
        return None
    return f"vLLM {version} is untested with this connector; tested: {' and '.join(TESTED_VERSIONS)}"


def _refuse(backend: str, why: str, todo: str) -> ConfigInvalid:
    return ConfigInvalid(f"KV of the attention backend {backend} cannot be transferred", why=why, todo=todo)


def check_parallel(parallel: Any) -> None:
    """Raises `ConfigInvalid` for a way of spreading a model over ranks that is not carried; `parallel` is vLLM's."""
    sizes = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1),
        "decode_context_parallel_size": getattr(parallel, "decode_context_parallel_size", 1),
    }
    for name, size in sizes.items():
        if size != 1:
            raise ConfigInvalid(f"{name} {size} with the Isthmus connector", todo=f"set {name} to 1", param=name)
