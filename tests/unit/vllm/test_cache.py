"""One rank's cache tensors: what fits the scheduler's blocks, and what does not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from isthmus_kvrelay.client.vllm.cache import RankCache
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv import form as forms
from isthmus_testing.vllm_parts import cpu_cache, layer_specs


def test_a_kernel_may_count_in_smaller_blocks_than_the_scheduler() -> None:
    (spec,) = layer_specs(layers=1, block_tokens=32)
    tensor = cpu_cache(dataclasses.replace(spec, block_tokens=16), 12)
    layer = RankCache([spec], {spec.name: tensor}, lambda _: forms.CPU_ATTN).layers[0]
    assert layer.views.block_tokens == 16
    assert torch.equal(layer.table(((5, 2),)), torch.tensor([10, 11, 4, 5]))


def test_blocks_that_are_not_whole_numbers_of_the_tensors_are_refused() -> None:
    (spec,) = layer_specs(layers=1, block_tokens=32)
    tensor = cpu_cache(dataclasses.replace(spec, block_tokens=24), 12)
    with pytest.raises(ConfigInvalid, match="24 tokens"):
        RankCache([spec], {spec.name: tensor}, lambda _: forms.CPU_ATTN)
    with pytest.raises(ConfigInvalid, match="registered no cache"):
        RankCache([spec], {}, lambda _: forms.CPU_ATTN)
