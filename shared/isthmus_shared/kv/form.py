"""How one layer's cache tensor is laid out, as the axes of the tensor that an engine hands over. Torch-free.

A form is written as the tensor's axes, outermost first; a bracket is one axis that holds several, and the last axis
takes in whatever axes of the tensor are left (which then must lie together in memory):

    b blocks   p K, then V   n tokens of a block   h KV heads   d head dim   1 an axis of one
    x a run of the head dim, m a run of tokens: 16 bytes long, so 8 elements of bf16 (the vector of a GPU's load)

``b h n (p d)`` is a tensor [blocks, heads, tokens, 2 · head_dim] in which V follows K for each token; strides are the
tensor's own, so NHD and HND of it are one form. Where K and V differ, both are written: ``b h (p d n) | b h (p n d)``.
Without ``p`` K and V are two tensors. A latent form (MLA) has one part, marked by ``| -``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from isthmus_shared.errors import ConfigInvalid

Axes = tuple[str, ...]
"""One string of letters for each axis of the tensor: ("b", "h", "n", "pd")."""

LETTERS = "bpnmhdx1"
RUN_BYTES = 16
_AXIS = re.compile(r"\(([^()]*)\)|([a-z1])")
_TODO = "write it as 'b h n (p d)' or 'b h (p d n) | b h (p n d)'; a latent as 'b n d | -'"


@dataclass(frozen=True)
class CacheForm:
    """A parsed form. Compare and print it by its text."""

    text: str

    def __post_init__(self) -> None:
        _check(self.text, self._sides)

    @cached_property
    def _sides(self) -> tuple[Axes | None, ...]:
        sides = tuple(None if side.strip() == "-" else _axes(side, self.text) for side in self.text.split("|"))
        return sides * 2 if len(sides) == 1 else sides

    @property
    def parts(self) -> tuple[Axes, ...]:
        """Axes of K and V, or of the latent alone."""
        return tuple(side for side in self._sides if side is not None)

    @property
    def latent(self) -> bool:
        return len(self.parts) == 1

    @property
    def joined(self) -> bool:
        """K and V are in one tensor (or there is only one part)."""
        return self.latent or any("p" in axis for axis in self.parts[0])

    def __str__(self) -> str:
        return self.text


def run_elements(itemsize_bytes: int) -> int:
    """Length of ``x`` and ``m``."""
    return max(1, RUN_BYTES // itemsize_bytes)


def _axes(side: str, whole: str) -> Axes:
    if _AXIS.sub("", side).strip():
        raise _refuse(whole, f"{_AXIS.sub('', side).strip()!r} is not an axis")
    axes = tuple("".join((group or single).split()) for group, single in _AXIS.findall(side))
    letters = "".join(axes).replace("1", "")
    for letter in letters:
        if letter not in LETTERS:
            raise _refuse(whole, f"{letter!r} is none of {', '.join(LETTERS)}")
        if letters.count(letter) > 1:
            raise _refuse(whole, f"{letter!r} is there twice")
    for letter in "bnd":
        if letter not in letters:
            raise _refuse(whole, f"{letter!r} is missing")
    return axes


def _check(text: str, sides: tuple[Axes | None, ...]) -> None:
    if len(sides) != 2 or sides[0] is None:
        raise _refuse(text, "there is one form for K and at most one for V")
    k, v = ("" if side is None else "".join(side) for side in sides)
    if sides[1] is None and "p" in k:
        raise _refuse(text, "a latent has no V")
    if sides[1] is not None and ("p" in k) != ("p" in v):
        raise _refuse(text, "K and V are in one tensor ('p' in both) or in two ('p' in neither)")


def _refuse(text: str, why: str) -> ConfigInvalid:
    return ConfigInvalid(f"cache form {text!r}", why=why, todo=_TODO, param="kv_layout")


NHD = CacheForm("b n h d")
"""Two tensors, token before head (Gaudi, and this project's `nhd`)."""
HND = CacheForm("b h n d")
"""Two tensors, head before token."""
PACKED_K = CacheForm("b h d n x | b h n d")
"""Two tensors: K's head dim in runs that lie together for neighbouring tokens."""
CONTENT = CacheForm("b h n (p d)")
"""vLLM since 0.32, FlashAttention, Triton, FlashInfer, AITER: [B, H, N, 2D]; NHD or HND by its strides."""
STACKED = CacheForm("p b n h d")
"""vLLM before that, FlashAttention: [2, B, N, H, D]."""
BLOCK_STACKED = CacheForm("b p n h d")
"""vLLM before that, FlashInfer: [B, 2, N, H, D]."""
CPU_ATTN = CacheForm("b h (p d n) | b h (p n d)")
"""vLLM's CPU backend without AMX, [B, H, N, 2D] by its shape: inside a head K transposed [D, N], then V [N, D]."""
SHUFFLE = CacheForm("b p (h d n x) | b p (h n d m)")
"""AITER's shuffled KV, [B, 2, N, H · D] by its shape: K [H, D/x, N, x], V [H, N/x, D, x]."""
HEAD_SLOTS = CacheForm("b (p h) n d")
"""ROCm's own attention: K and V are two slots of the head axis."""
MLA = CacheForm("b n d | -")
"""The latent, [B, N, 576]."""
MLA_HEAD = CacheForm("b h n d | -")
"""The latent with a head axis of one, [B, 1, N, 576]."""
