"""The sampler in vLLM draws what `engines.sampling` draws, row by row, whatever stands beside a row in the batch."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isthmus_shared.engines.sampling import sample
from isthmus_shared.engines.vllm.turns import SAMPLING_KEY
from isthmus_shared.messages.work import SamplingParams

VOCABULARY = 300


def parts() -> Any:
    """Imported late: only where vLLM is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from vllm.v1.sample.logits_processor import MoveDirectionality

        from isthmus_shared.engines.vllm.sampler import SeededSampler
    return torch, SeededSampler, MoveDirectionality


def some_params(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=9,
        temperature=draw.choice([0.0, 0.3, 1.0, 1.7]),
        top_p=draw.choice([1.0, 0.9, 0.4, 0.01]),
        top_k=draw.choice([0, 1, 7, 299, 5000]),
        min_p=draw.choice([0.0, 0.05, 1.0]),
        seed=draw.randrange(2**64),
        presence_penalty=draw.choice([0.0, 1.5, -2.0]),
        frequency_penalty=draw.choice([0.0, 0.7]),
    )


def update(**changes: Any) -> Any:
    return SimpleNamespace(**({"removed": (), "added": (), "moved": (), "batch_size": 0} | changes))


def extra(params: SamplingParams, previous: tuple[int, ...], first_index: int) -> Any:
    return SimpleNamespace(
        extra_args={SAMPLING_KEY: {"params": params, "previous": previous, "first_index": first_index}}
    )


@pytest.mark.parametrize("seed", range(40))
def test_it_draws_what_the_other_engines_draw(seed: int) -> None:
    torch, sampler_type, _ = parts()
    draw, sampler = random.Random(seed), sampler_type(None, "cpu", False)
    rows = []
    for index in range(6):
        previous = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randrange(4)))
        output = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(4))]
        rows.append((index, some_params(draw), previous, output))
    sampler.update_state(
        update(
            added=[
                (index, extra(params, previous, len(previous)), None, output)
                for index, params, previous, output in rows
            ]
        )
    )
    logits = torch.randn((7, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * 4
    untouched = logits[6].clone()
    chosen = sampler.apply(logits.clone())
    assert torch.equal(chosen[6], untouched)
    for index, params, previous, output in rows:
        wanted, _ = sample(
            params,
            output_index=len(previous) + len(output),
            previous=[*previous, *output],
            logits=logits[index].numpy().astype(np.float32),
        )
        assert int(chosen[index].argmax()) == wanted, params


def test_rows_keep_their_requests_when_the_batch_moves() -> None:
    torch, sampler_type, directions = parts()
    sampler = sampler_type(None, "cpu", False)
    only = [SamplingParams(max_tokens=2, temperature=1.0, seed=seed) for seed in range(3)]
    sampler.update_state(update(added=[(row, extra(params, (), 0), None, []) for row, params in enumerate(only)]))
    logits = torch.randn((3, VOCABULARY), generator=torch.Generator().manual_seed(1)).repeat(1, 1)
    logits[:] = logits[0]
    first = sampler.apply(logits.clone()).argmax(dim=1).tolist()
    assert len(set(first)) == 3, "three seeds draw three tokens from these logits"
    sampler.update_state(update(moved=[(0, 2, directions.SWAP)]))
    assert sampler.apply(logits.clone()).argmax(dim=1).tolist() == [first[2], first[1], first[0]]
    sampler.update_state(update(removed=[0], moved=[(2, 0, directions.UNIDIRECTIONAL)]))
    moved = sampler.apply(logits.clone())
    assert moved[:2].argmax(dim=1).tolist() == [first[0], first[1]]
    assert torch.equal(moved[2], logits[2]), "the row is nobody's now"


def test_a_greedy_request_takes_over_a_row_of_a_sampled_one() -> None:
    torch, sampler_type, _ = parts()
    sampler = sampler_type(None, "cpu", False)
    sampler.update_state(update(added=[(0, extra(SamplingParams(max_tokens=2), (), 0), None, [])]))
    sampler.update_state(update(added=[(0, SimpleNamespace(extra_args=None), None, [])]))
    logits = torch.randn((1, VOCABULARY))
    assert torch.equal(sampler.apply(logits.clone()), logits)
