from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from isthmus_planner.routing.columns import NEVER
from isthmus_planner.routing.picker import MAX_PAIRS, PairCosts, best_pair, least


def pairs(
    p: list[float], d: list[float], out: list[float], inn: list[float], extra: Callable[[int, int], float] | None = None
) -> tuple[PairCosts, list[int]]:
    looked = [0]

    def crossing(i: int, j: int) -> float:
        looked[0] += 1
        return max(out[i], inn[j]) + (0.0 if extra is None else extra(i, j))

    sent = [a + b for a, b in zip(p, out, strict=True)]
    received = [a + b for a, b in zip(d, inn, strict=True)]
    return PairCosts(p, d, sent, received, crossing), looked


def test_the_least_is_the_first_of_equals_and_none_where_nobody_is_left() -> None:
    assert least([3.0, 1.0, 1.0]) == 1
    assert least([NEVER, NEVER]) is None
    assert least([]) is None


def test_on_even_rails_one_pair_is_looked_at() -> None:
    n = 500
    costs, looked = pairs([0.01 * i for i in range(n)], [0.02 * (n - i) for i in range(n)], [0.5] * n, [0.5] * n)
    found = best_pair(costs)
    assert found is not None
    assert found[:2] == (0, n - 1)
    assert looked[0] == 1


@pytest.mark.parametrize("seed", range(30))
def test_on_uneven_rails_the_best_pair_is_found(seed: int) -> None:
    rng = random.Random(seed)
    p, d = ([rng.choice([rng.random(), NEVER]) for _ in range(12)] for _ in range(2))
    out, inn = ([rng.random() for _ in range(12)] for _ in range(2))
    lanes = {(i, j): rng.choice([0.0, 0.0, rng.random(), NEVER]) for i in range(12) for j in range(12)}
    costs, _ = pairs(p, d, out, inn, lambda i, j: lanes[i, j])
    expected = min(p[i] + d[j] + costs.crossing(i, j) for i in range(12) for j in range(12))
    found = best_pair(costs)
    if expected == NEVER:
        assert found is None
    else:
        assert found is not None
        i, j, cost = found
        assert cost == pytest.approx(expected)
        assert p[i] + d[j] + costs.crossing(i, j) == pytest.approx(cost)


def test_however_uneven_the_rails_the_pairs_that_are_looked_at_are_bounded() -> None:
    n = 200
    rng = random.Random(1)
    costs, looked = pairs([0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n, lambda _i, _j: 1.0 + rng.random())
    assert best_pair(costs) is not None
    assert looked[0] <= MAX_PAIRS + 1


def test_a_pair_that_is_one_worker_is_never_taken() -> None:
    costs, _ = pairs([0.0, 5.0], [0.0, 5.0], [0.0, 0.0], [0.0, 0.0], lambda i, j: NEVER if i == j else 0.0)
    found = best_pair(costs)
    assert found is not None
    assert found[0] != found[1]
    lonely, _ = pairs([0.0], [0.0], [0.0], [0.0], lambda _i, _j: NEVER)
    assert best_pair(lonely) is None
