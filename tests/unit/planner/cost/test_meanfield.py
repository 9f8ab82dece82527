from __future__ import annotations

import random

import numpy as np
import pytest

from isthmus_planner.cost.constants import Constants
from isthmus_planner.cost.laws import DecodeLaw, PrefillLaw
from isthmus_planner.cost.meanfield import closed_loop

DECODE = DecodeLaw(0.004, 0.006, 128, 4, 0.7, 20e-6, 20e-9)
PREFILL = PrefillLaw(0.01, 20e-6, 1e-9, 0, 0, 0.001, 0.001, 128, 4, 0.7, 2e-6)
PLAIN = Constants(interference=1.0, admission_steps=0.5)


def test_a_single_client_meets_nobody() -> None:
    found = closed_loop(DECODE, PREFILL, PLAIN, 1.0, 1000.0, 201.0)
    step_s = DECODE.step_s(1.0, 1100.5)
    assert found.tpot_s == pytest.approx(found.itl_s)
    assert found.itl_s == pytest.approx(step_s, rel=0.02)
    assert found.ttft_s == pytest.approx(PREFILL.time_s(1000) + 0.5 * step_s, rel=0.01)
    assert found.e2el_s == pytest.approx(found.ttft_s + 200 * found.tpot_s)


def test_littles_law_holds_everywhere() -> None:
    clients = np.array([1.0, 4, 32, 256])
    found = closed_loop(DECODE, PREFILL, PLAIN, clients, np.full(4, 2000.0), np.full(4, 300.0))
    assert found.requests_per_s * found.e2el_s == pytest.approx(clients)
    assert found.batch == pytest.approx(found.requests_per_s * 299 * found.tpot_s, rel=1e-3)


def test_prefills_of_others_stretch_every_token_but_not_the_step() -> None:
    calm = closed_loop(DECODE, PREFILL, Constants(interference=0.0), 32.0, 4000.0, 300.0)
    busy = closed_loop(DECODE, PREFILL, Constants(interference=1.0), 32.0, 4000.0, 300.0)
    assert calm.tpot_s == pytest.approx(calm.itl_s)
    assert busy.tpot_s > 1.5 * busy.itl_s
    per_token = busy.requests_per_s * PREFILL.time_s(4000) * 31 / 32
    assert busy.tpot_s == pytest.approx(busy.itl_s / (1 - per_token), rel=1e-3)


def test_clients_beyond_the_memory_wait_and_add_no_throughput() -> None:
    room = 8 * 2300.0
    full = closed_loop(DECODE, PREFILL, PLAIN, 8.0, 2000.0, 300.0, max_kv_tokens=room)
    over = closed_loop(DECODE, PREFILL, PLAIN, 24.0, 2000.0, 300.0, max_kv_tokens=room)
    assert over.requests_per_s == pytest.approx(full.requests_per_s)
    assert over.tpot_s == pytest.approx(full.tpot_s)
    assert over.ttft_s - full.ttft_s == pytest.approx(16 / full.requests_per_s)
    assert over.e2el_s == pytest.approx(24 / over.requests_per_s)


def test_a_loop_that_prefill_all_but_fills_still_has_an_answer() -> None:
    slow = PrefillLaw(0.0, 1e-3, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    found = closed_loop(DECODE, slow, PLAIN, np.array([64.0, 512.0]), 8000.0, 20.0)
    assert np.all(np.isfinite(found.e2el_s))
    capacity = 1 / slow.time_s(8000.0)
    assert found.requests_per_s == pytest.approx([capacity, capacity], rel=0.1)
    assert found.tpot_s == pytest.approx(found.itl_s + 8.0), "a token waits for one prompt at most; prompts queue"
    assert found.ttft_s == pytest.approx(np.array([64, 512]) / found.requests_per_s - 19 * found.tpot_s)


@pytest.mark.parametrize(("clients", "isl", "osl"), [(4, 1000, 300), (16, 3000, 200), (32, 500, 400)])
def test_the_closed_form_agrees_with_stepping_through_every_token(clients: int, isl: int, osl: int) -> None:
    rate, tpot_s = _step_by_step(clients, isl, osl)
    found = closed_loop(DECODE, PREFILL, Constants(interference=1.0, admission_steps=0.0), clients, isl, osl)
    assert found.requests_per_s == pytest.approx(rate, rel=0.04)
    assert found.tpot_s == pytest.approx(tpot_s, rel=0.04)


def _step_by_step(clients: int, isl: int, osl: int) -> tuple[float, float]:
    """Requests per second and mean time per output token; every prompt is prefilled at once, before the next step."""
    generator, requests = random.Random(1), clients * 12

    def length() -> int:
        return round(osl * generator.uniform(0.8, 1.2))

    now_s, done, waiting = 0.0, 0, [length() for _ in range(clients)]
    running: list[list[float]] = []  # [tokens left, context, began]
    begun_s, count, spent_s, tokens = 0.0, 0, 0.0, 0.0
    while done < requests:
        for total in waiting:
            now_s += PREFILL.time_s(isl)
            running.append([total - 1, isl, now_s, total - 1])
        waiting = []
        now_s += DECODE.step_s(len(running), sum(each[1] for each in running))
        for each in running:
            each[0] -= 1
            each[1] += 1
        for each in [each for each in running if each[0] <= 0]:
            running.remove(each)
            waiting.append(length())
            done += 1
            if done == clients * 2:
                begun_s = now_s
            elif done > clients * 2:
                count, spent_s, tokens = count + 1, spent_s + now_s - each[2], tokens + each[3]
    return count / (now_s - begun_s), spent_s / tokens
