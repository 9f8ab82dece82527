from __future__ import annotations

import pytest

from isthmus_ingress.openai.errors import TooManyRequests
from isthmus_ingress.quotas import Quotas
from isthmus_ingress.tenants import ANYONE, Quota, Tenant

ACME, OTHER = Tenant("acme"), Tenant("other")


def quotas(**limits: int) -> Quotas:
    return Quotas({ACME: Quota(**limits), OTHER: Quota()})


def refused_for_s(found: Quotas, now_s: float, prompt_tokens: int = 1) -> float | None:
    with pytest.raises(TooManyRequests) as refusal:
        found.begin(ACME, prompt_tokens, now_s=now_s)
    return refusal.value.retry_after_s


def test_a_minutes_requests_may_come_at_once_and_then_evenly() -> None:
    found = quotas(requests_per_min=6)
    for _ in range(6):
        found.begin(ACME, 1, now_s=100.0)
    assert refused_for_s(found, 100.0) == pytest.approx(10.0)
    assert refused_for_s(found, 104.0) == pytest.approx(6.0)
    found.begin(ACME, 1, now_s=110.0)
    assert refused_for_s(found, 110.0) == pytest.approx(10.0)


def test_a_refusal_costs_nothing() -> None:
    found = quotas(requests_per_min=2, max_concurrent=1)
    found.begin(ACME, 1, now_s=0.0)
    for _ in range(50):
        assert refused_for_s(found, 0.0) is None
    found.end(ACME)
    found.begin(ACME, 1, now_s=0.0)


def test_what_was_generated_is_waited_for_by_the_next_request() -> None:
    found = quotas(tokens_per_min=600)
    found.begin(ACME, 100, now_s=0.0)
    found.generated(ACME, 1100, now_s=0.0)
    assert refused_for_s(found, 0.0, 10) == pytest.approx(61.0)
    assert refused_for_s(found, 60.0, 10) == pytest.approx(1.0)
    found.begin(ACME, 10, now_s=61.0)


def test_a_prompt_beyond_a_minutes_tokens_waits_for_a_full_bucket_only() -> None:
    found = quotas(tokens_per_min=60)
    found.begin(ACME, 600, now_s=0.0)
    assert refused_for_s(found, 0.0) == pytest.approx(541.0)
    found.begin(ACME, 600, now_s=600.0)


def test_a_place_is_free_again_when_its_request_has_ended() -> None:
    found = quotas(max_concurrent=2)
    found.begin(ACME, 1, now_s=0.0)
    found.begin(ACME, 1, now_s=0.0)
    refused_for_s(found, 1000.0)
    found.end(ACME)
    found.begin(ACME, 1, now_s=1000.0)


def test_one_tenants_use_is_nobody_elses() -> None:
    found = quotas(requests_per_min=1, tokens_per_min=1, max_concurrent=1)
    found.begin(ACME, 1, now_s=0.0)
    for tenant in (OTHER, ANYONE):
        for _ in range(100):
            found.begin(tenant, 10**6, now_s=0.0)
            found.generated(tenant, 10**6, now_s=0.0)
    assert refused_for_s(found, 0.0) is None


def test_headers_say_what_is_left_and_when_it_is_full_again() -> None:
    found = quotas(requests_per_min=60, tokens_per_min=120)
    found.begin(ACME, 30, now_s=0.0)
    assert found.headers(ACME, now_s=0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "120",
        "x-ratelimit-remaining-tokens": "90",
        "x-ratelimit-reset-tokens": "15.000s",
    }
    found.generated(ACME, 500, now_s=0.0)
    assert found.headers(ACME, now_s=0.0)["x-ratelimit-remaining-tokens"] == "0"
    assert found.headers(OTHER, now_s=0.0) == found.headers(ANYONE, now_s=0.0) == {}
