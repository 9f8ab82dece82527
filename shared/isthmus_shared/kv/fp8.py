"""FP8 KV between the two flavours of e4m3, exact: the bits stay, the scale doubles or halves.

e4m3fn (OCP, NVIDIA) has exponent bias 7, e4m3fnuz (CDNA 3) bias 8, so a code means half as much in the latter
(Micikevicius et al. 2022; Noune et al. 2022). Three kinds of code are exceptions:

    0x80          fn: -0          fnuz: NaN       a -0 becomes +0, its NaN becomes fn's
    0x7f, 0xff    fn: NaN         fnuz: ±240      a NaN becomes fnuz's; ±240 would be ±480, which fn has no code for

So a cache of e4m3fnuz with a ±240 in it is refused (or becomes the nearest, ±448, where that is asked for).
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus_shared.errors import TransferFailed
from isthmus_shared.kv.manifest import KvDtype

FLAVOURS = frozenset({KvDtype.FP8_E4M3FN, KvDtype.FP8_E4M3FNUZ})
FN_NAN, FNUZ_NAN = 0x7F, 0x80


def convert_codes(codes: Tensor, source: KvDtype, target: KvDtype, *, saturate: bool = False) -> int:
    """Change `codes` (uint8, any shape) in place from one flavour to the other.

    Returns how many were saturated. Raises `TransferFailed` instead, unless `saturate`, if there is one to saturate.
    """
    assert {source, target} <= FLAVOURS, f"{source} to {target} is no change of FP8 flavour"
    if source is target:
        return 0
    # 0x80 is the only code with a low half of zero but 0; 0x7f and 0xff are those whose low seven bits are all set.
    largest = (codes & 0x7F) == 0x7F
    odd = codes == 0x80
    if target is KvDtype.FP8_E4M3FNUZ:
        codes.masked_fill_(odd, 0x00)
        codes.masked_fill_(largest, FNUZ_NAN)
        return 0
    count = int(largest.sum())
    if count and not saturate:
        raise TransferFailed(
            f"{count} FP8 values have no code in {target}",
            why=f"±240 of {source} is ±480 at the other's scale, and {target} ends at ±448",
            todo="quantise to at most ±224 of e4m3fnuz, as vLLM does, or allow saturation",
        )
    codes.sub_(largest.to(torch.uint8))
    codes.masked_fill_(odd, FN_NAN)
    return count


def scale_factor(source: KvDtype, target: KvDtype) -> float:
    """What a scale of `source` is multiplied with, so that the same bits mean the same in `target`."""
    if source is target:
        return 1.0
    return 2.0 if target is KvDtype.FP8_E4M3FNUZ else 0.5


def expand_scales(scales: Tensor, granule: int, token_start: int, token_end: int, own_granule: int) -> Tensor:
    """Scales per block [blocks of `granule` tokens, heads] of a flow, for blocks of `own_granule`, a divisor.

    Both count from token 0; the first row of `scales` and of the result is the block that has `token_start`.
    """
    assert granule % own_granule == 0, f"{own_granule} is no divisor of {granule}"
    own = torch.arange(token_start // own_granule, -(-token_end // own_granule))
    return scales[own * own_granule // granule - token_start // granule]
