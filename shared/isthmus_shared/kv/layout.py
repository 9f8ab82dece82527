"""The physical form in which an engine that chooses for itself keeps its KV cache. Torch-free: only shapes and names.

A layout is written ``<order>:<block tokens>:<dtype>[:packed<x>]``: ``nhd:16:fp32`` is [block, token, head, dim] in
blocks of 16 tokens; ``hnd:64:fp32:packed4`` has the head before the token, and splits K's head dim into runs of x
elements that lie together for neighbouring tokens. Or it is a vendor's by name, ``amd-shuffle``, with another block
size or dtype behind it if wanted: ``cpu:32:fp32``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv import form as forms
from isthmus_shared.kv.form import Axes, CacheForm, run_elements
from isthmus_shared.kv.manifest import KvDtype
from isthmus_shared.kv.profiles import PROFILES

MAX_BLOCK_TOKENS = 4096
"""Larger than any vendor's block; a typing error beyond it would make one block eat the whole pool."""


class HeadOrder(StrEnum):
    """Which of token (N) and head (H) is the outer dimension inside a block."""

    NHD = "nhd"
    HND = "hnd"


@dataclass(frozen=True, slots=True)
class KvLayout:
    block_tokens: int
    order: HeadOrder | str
    """A head order, or the name of a vendor's profile."""
    dtype: KvDtype
    packed_k: int | None = None
    """x: K is [blocks, heads, head_dim / x, block_tokens, x]. V stays [blocks, heads, block_tokens, head_dim]."""

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise _refuse(str(self), f"a block has 1 to {MAX_BLOCK_TOKENS} tokens, not {self.block_tokens}")
        if self.packed_k is not None and self.packed_k < 1:
            raise _refuse(str(self), f"packed{self.packed_k} is not a positive run length")
        if self.packed_k is not None and self.order != HeadOrder.HND:
            raise _refuse(str(self), "packed K exists only with the order hnd")

    @classmethod
    def parse(cls, text: str) -> KvLayout:
        """The layout that `text` names, or `ConfigInvalid`."""
        parts = text.strip().lower().split(":")
        if parts[0] in PROFILES:
            return _vendor(parts, text)
        if not 3 <= len(parts) <= 4:
            raise _refuse(text, f"it is no vendor's profile, and has {len(parts)} parts separated by ':'")
        if parts[0] not in set(HeadOrder):
            raise _refuse(text, f"the order is nhd or hnd, not {parts[0]!r}")
        packed = None
        if len(parts) == 4:
            if not parts[3].startswith("packed"):
                raise _refuse(text, f"the last part is packed<x>, not {parts[3]!r}")
            packed = _number(parts[3].removeprefix("packed"), text)
        return cls(_number(parts[1], text), HeadOrder(parts[0]), _dtype(parts[2], text), packed)

    def __str__(self) -> str:
        packed = "" if self.packed_k is None else f":packed{self.packed_k}"
        return f"{self.order}:{self.block_tokens}:{self.dtype}{packed}"

    def describe(self) -> str:
        """For people: ``NHD, block 16, fp32``."""
        name = self.order.upper() if isinstance(self.order, HeadOrder) else self.order
        packed = "" if self.packed_k is None else f", K packed by {self.packed_k}"
        return f"{name}, block {self.block_tokens}, {self.dtype}{packed}"

    @property
    def form(self) -> CacheForm:
        """Of the dense tensors that `tensor_shapes` gives."""
        if not isinstance(self.order, HeadOrder):
            return PROFILES[self.order].form
        if self.packed_k is not None:
            return forms.PACKED_K
        return forms.NHD if self.order is HeadOrder.NHD else forms.HND

    @property
    def run(self) -> int:
        """Elements of a run (`x`, `m`) in the form."""
        return run_elements(self.dtype.itemsize_bytes) if self.packed_k is None else self.packed_k

    @property
    def fp8_scale(self) -> float:
        """Of every FP8 value kept in this layout: 1, or what means the same in the other flavour."""
        return 2.0 if self.dtype is KvDtype.FP8_E4M3FNUZ else 1.0

    def tensor_shapes(self, blocks: int, kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of one layer's tensors: one that holds K and V, or K's and V's.

        Raises `ConfigInvalid` when runs divide the head dim, or the block, with a rest.
        """
        sizes = {"b": blocks, "p": 2, "n": self.block_tokens, "h": kv_heads, "d": head_dim, "1": 1}
        shapes = tuple(self._shape(axes, sizes) for axes in self.form.parts)
        return shapes[:1] if self.form.joined else shapes

    def _shape(self, axes: Axes, sizes: dict[str, int]) -> tuple[int, ...]:
        letters, sizes = "".join(axes), dict(sizes)
        for short, long, what in (("x", "d", "the model's head_dim"), ("m", "n", "the block size")):
            if short in letters:
                if sizes[long] % self.run:
                    raise _refuse(str(self), f"{what} {sizes[long]} is not a multiple of {self.run}")
                sizes[short], sizes[long] = self.run, sizes[long] // self.run
        shape = []
        for axis in axes:
            size = 1
            for letter in axis:
                size *= sizes[letter]
            shape.append(size)
        return tuple(shape)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


def _vendor(parts: list[str], text: str) -> KvLayout:
    profile = PROFILES[parts[0]]
    block, dtype = profile.block_tokens, profile.dtype
    if len(parts) > 3:
        raise _refuse(text, f"it has {len(parts)} parts separated by ':'")
    for part in parts[1:]:
        if part[:1].isdigit():
            block = _number(part, text)
        else:
            dtype = _dtype(part, text)
    return KvLayout(block, parts[0], dtype)


def _dtype(text: str, whole: str) -> KvDtype:
    if text not in set(KvDtype):
        raise _refuse(whole, f"the dtype is one of {', '.join(KvDtype)}, not {text!r}")
    return KvDtype(text)


def _number(text: str, whole: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise _refuse(whole, f"{text!r} is not a whole number")
    return int(text)


def _refuse(text: str, why: str) -> ConfigInvalid:
    todo = (
        f"write it as <nhd|hnd>:<block tokens>:<{'|'.join(KvDtype)}>[:packed<x>], "
        f"or name one of {', '.join(PROFILES)}[:<block tokens>][:<dtype>]"
    )
    return ConfigInvalid(f"KV layout {text!r}", why=why, todo=todo, param="kv_layout")
