"""What each tenant may use: requests and tokens per minute, and requests at once. Pure: time is an argument.

Both rates are buckets that hold a minute's worth and fill evenly. A request takes one from the first, and its prompt's
tokens from the second; what it generates is taken as it comes, below zero if need be, and is waited for by the next
request. So a tenant gets its rate exactly over time, and exceeds it for a moment by no more than what it has in flight.
A prompt larger than a minute's tokens is let in once the bucket is full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from isthmus_ingress.openai.errors import TooManyRequests
from isthmus_ingress.tenants import Quota, Tenant

MINUTE_S = 60.0


class Bucket:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._level = float(capacity)
        self._at_s = -math.inf

    def level(self, now_s: float) -> float:
        if now_s > self._at_s:
            self._level = min(self.capacity, self._level + (now_s - self._at_s) * self.capacity / MINUTE_S)
            self._at_s = now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until it holds that much, or all it can hold; 0 when it does now."""
        missing = min(amount, self.capacity) - self.level(now_s)
        return max(0.0, missing * MINUTE_S / self.capacity)

    def take(self, amount: float, now_s: float) -> None:
        self._level = self.level(now_s) - amount


@dataclass(slots=True)
class _Account:
    quota: Quota
    requests: Bucket | None
    tokens: Bucket | None
    running: int = 0


class Quotas:
    """Tenants without a quota are not kept: whoever asks is told that all is well."""

    def __init__(self, quotas: Mapping[Tenant, Quota]) -> None:
        self._accounts = {
            tenant.name: _Account(quota, _bucket(quota.requests_per_min), _bucket(quota.tokens_per_min))
            for tenant, quota in quotas.items()
        }

    def begin(self, tenant: Tenant, prompt_tokens: int, *, now_s: float) -> None:
        """Raises `TooManyRequests`, which costs nothing; otherwise `end` must follow once."""
        account = self._accounts.get(tenant.name)
        if account is None:
            return
        limit = account.quota.max_concurrent
        if limit is not None and account.running >= limit:
            raise _refusal(tenant, "concurrent requests", f"{account.running} of {limit} are in progress", None)
        requests, tokens = account.requests, account.tokens
        if requests is not None and (wait_s := requests.wait_s(1, now_s)) > 0:
            raise _refusal(tenant, "requests per minute", f"the limit is {requests.capacity}", wait_s)
        if tokens is not None and (wait_s := tokens.wait_s(prompt_tokens, now_s)) > 0:
            why = f"the limit is {tokens.capacity}, and this prompt has {prompt_tokens}"
            raise _refusal(tenant, "tokens per minute", why, wait_s)
        if requests is not None:
            requests.take(1, now_s)
        if tokens is not None:
            tokens.take(prompt_tokens, now_s)
        account.running += 1

    def limits_tokens(self, tenant: Tenant) -> bool:
        account = self._accounts.get(tenant.name)
        return account is not None and account.tokens is not None

    def generated(self, tenant: Tenant, tokens: int, *, now_s: float) -> None:
        account = self._accounts.get(tenant.name)
        if account is not None and account.tokens is not None:
            account.tokens.take(tokens, now_s)

    def end(self, tenant: Tenant) -> None:
        account = self._accounts.get(tenant.name)
        if account is not None:
            assert account.running > 0, "a request ended twice"
            account.running -= 1

    def headers(self, tenant: Tenant, *, now_s: float) -> dict[str, str]:
        """OpenAI's ``x-ratelimit-*``; none for what is not limited."""
        account = self._accounts.get(tenant.name)
        if account is None:
            return {}
        told: dict[str, str] = {}
        for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            if bucket is None:
                continue
            told[f"x-ratelimit-limit-{name}"] = str(bucket.capacity)
            told[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level(now_s) + 1e-9)))
            told[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.capacity, now_s):.3f}s"
        return told


def _bucket(per_min: int | None) -> Bucket | None:
    return None if per_min is None else Bucket(per_min)


def _refusal(tenant: Tenant, what: str, why: str, wait_s: float | None) -> TooManyRequests:
    return TooManyRequests(
        f"Rate limit reached for {what} of {tenant.name}", why=why, todo="try again later", retry_after_s=wait_s
    )
