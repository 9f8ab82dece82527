"""Every code of both flavours, against torch's own reading of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isthmus_shared.errors import TransferFailed
from isthmus_shared.kv.fp8 import convert_codes, expand_scales, scale_factor
from isthmus_shared.kv.manifest import KvDtype

FN, FNUZ = KvDtype.FP8_E4M3FN, KvDtype.FP8_E4M3FNUZ
READ = {FN: torch.float8_e4m3fn, FNUZ: torch.float8_e4m3fnuz}
BEYOND_FN = (0x7F, 0xFF)


def codes(*without: int) -> Tensor:
    return torch.tensor([code for code in range(256) if code not in without], dtype=torch.uint8)


def values(of: Tensor, flavour: KvDtype, scale: float) -> Tensor:
    return of.view(READ[flavour]).double() * scale


@pytest.mark.parametrize("scale", [1.0, 0.037, 3.5e4])
@pytest.mark.parametrize(("source", "target", "without"), [(FN, FNUZ, ()), (FNUZ, FN, BEYOND_FN)])
def test_every_code_keeps_its_value(source: KvDtype, target: KvDtype, without: tuple[int, ...], scale: float) -> None:
    given = codes(*without)
    got = given.clone()
    assert convert_codes(got, source, target) == 0
    wanted = values(given, source, scale)
    assert torch.equal(
        values(got, target, scale * scale_factor(source, target)).nan_to_num(nan=1e9), wanted.nan_to_num(nan=1e9)
    )
    changed = {int(a): int(b) for a, b in zip(given, got, strict=True) if a != b}
    assert changed == ({0x80: 0, 0x7F: 0x80, 0xFF: 0x80} if source is FN else {0x80: 0x7F})


def test_what_fn_cannot_express_is_refused_or_saturated() -> None:
    for code, nearest in ((0x7F, 448.0), (0xFF, -448.0)):
        one = torch.tensor([0x01, code], dtype=torch.uint8)
        with pytest.raises(TransferFailed, match="1 FP8 values have no code in fp8_e4m3fn"):
            convert_codes(one, FNUZ, FN)
        assert one[1] == code, "a refusal changes nothing"
        assert convert_codes(one, FNUZ, FN, saturate=True) == 1
        assert values(one, FN, 1.0).tolist() == [2.0**-9, nearest]


def test_one_flavour_is_copied_as_it_is() -> None:
    for flavour in (FN, FNUZ):
        same = codes()
        assert convert_codes(same, flavour, flavour) == 0
        assert torch.equal(same, codes())
        assert scale_factor(flavour, flavour) == 1.0


@pytest.mark.parametrize(("start", "end"), [(0, 96), (5, 96), (32, 33), (40, 70), (0, 1)])
@pytest.mark.parametrize("own", [1, 8, 16, 32])
def test_a_token_keeps_its_scale_in_smaller_blocks(start: int, end: int, own: int) -> None:
    granule = 32
    scales = torch.arange(start // granule, -(-end // granule)).float()[:, None] + torch.tensor([0.25, 0.5])
    mine = expand_scales(scales, granule, start, end, own)
    assert len(mine) == -(-end // own) - start // own
    for token in range(start, end):
        wanted = scales[token // granule - start // granule]
        assert torch.equal(mine[token // own - start // own], wanted)
