from __future__ import annotations

import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from isthmus_shared.engines.sampling import sample, uniform
from isthmus_shared.messages.work import SamplingParams

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03], dtype=np.float32))


def draw(count: int = 4000, *, logits: npt.NDArray[np.float32] = LOGITS, **params: float) -> dict[int, float]:
    """Share of each token over `count` output indexes."""
    given = SamplingParams.model_validate({"max_tokens": count, "seed": 11} | params)
    taken = Counter(sample(given, output_index=i, previous=(), logits=logits)[0] for i in range(count))
    return {token: times / count for token, times in taken.items()}


def test_tokens_come_as_often_as_their_probability_says() -> None:
    shares = draw()
    for token, probability in enumerate(np.exp(LOGITS)):
        assert shares[token] == pytest.approx(probability, abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    weights = np.exp(LOGITS.astype(float) / 0.5)
    assert draw(temperature=0.5)[0] == pytest.approx(weights[0] / weights.sum(), abs=0.03)
    assert draw(temperature=1e-9) == {0: 1.0}


def test_greedy_takes_the_most_likely_and_the_first_among_equals() -> None:
    greedy = SamplingParams(max_tokens=1, temperature=0)
    assert sample(greedy, output_index=0, previous=(), logits=LOGITS)[0] == 0
    equal = np.array([1.0, 2.0, 2.0], dtype=np.float32)
    assert sample(greedy, output_index=0, previous=(), logits=equal)[0] == 1


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.76}, {0, 1, 2}),
        ({"top_p": 1e-6}, {0}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),  # of the three left, the first two have 0.83 of the mass
        ({"top_k": 3, "min_p": 0.4}, {0, 1}),
    ],
)
def test_truncation_keeps_exactly_the_tokens_it_names(params: dict[str, float], kept: set[int]) -> None:
    assert set(draw(**params)) == kept


def test_order_of_ids_does_not_matter_to_truncation() -> None:
    assert set(draw(logits=LOGITS[::-1].copy(), top_k=2)) == {3, 4}


def test_penalties_are_taken_off_by_presence_and_by_count() -> None:
    logits = np.array([3.0, 2.5, 0.0], dtype=np.float32)

    def greedy(previous: list[int], **penalties: float) -> int:
        params = SamplingParams.model_validate({"max_tokens": 9, "temperature": 0} | penalties)
        return sample(params, output_index=len(previous), previous=previous, logits=logits)[0]

    assert greedy([0], presence_penalty=0.4) == 0
    assert greedy([0], presence_penalty=0.6) == 1
    assert greedy([0, 0], frequency_penalty=0.2) == 0
    assert greedy([0, 0, 0], frequency_penalty=0.2) == 1
    assert greedy([1, 1], presence_penalty=-0.6) == 1


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.1, top_k=1, presence_penalty=2.0, logprobs=2)
    token, entry = sample(params, output_index=0, previous=[0], logits=LOGITS)
    assert token == 1
    assert entry is not None
    assert entry.logprob == pytest.approx(math.log(0.25), abs=1e-6)
    assert [t for t, _ in entry.top] == [0, 1]
    assert entry.top[0][1] == pytest.approx(math.log(0.5), abs=1e-6)


def test_zero_logprobs_gives_the_chosen_one_only() -> None:
    _, entry = sample(SamplingParams(max_tokens=1, logprobs=0), output_index=0, previous=(), logits=LOGITS)
    assert entry is not None
    assert entry.top == ()


def test_a_draw_depends_on_seed_and_index_only() -> None:
    assert uniform(5, 3) == uniform(5, 3)
    assert len({uniform(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(100)}) == 300
    assert all(0 <= uniform(9, index) < 1 for index in range(1000))


def test_a_tiny_change_of_the_logits_does_not_change_the_draw() -> None:
    random = np.random.default_rng(1)
    logits = random.standard_normal(264).astype(np.float32)
    params = SamplingParams(max_tokens=99, seed=3, top_p=0.9)
    nudged = logits + random.uniform(-1e-7, 1e-7, 264).astype(np.float32)
    for index in range(50):
        one, other = (sample(params, output_index=index, previous=(), logits=x)[0] for x in (logits, nudged))
        assert one == other
