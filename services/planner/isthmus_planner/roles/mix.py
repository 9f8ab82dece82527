"""What is asked for just now: lengths and arrival rates by model. Pure: time is an argument.

Prompt lengths are known as requests arrive; answer lengths only as they end, which for long answers is minutes later.
So an answer's expected length is what its client allows at most, times the share of that which such requests have used
lately. Allowances are told apart by powers of two: clients that leave it open and clients that know what they want
behave differently.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from isthmus_shared.ids import RequestId

HALF_LIFE_S = 10.0
"""An arrival counts half after so long: a mix that turns is seen within two of them."""
WINDOW_S = 6 * HALF_LIFE_S
"""Older arrivals have less than two per cent of a fresh one's weight, and are forgotten."""
MAX_ARRIVALS = 2048
"""Of one model. At a higher rate than this window holds, the oldest go first, and the rate is still right."""
MAX_MODELS = 64
MAX_OPEN = 65_536
"""Requests whose end is awaited; beyond it the oldest are not learned from."""
SHARE_WEIGHT = 0.05
"""Of the newest answer in the share of its allowance that answers use."""

_DECAY = math.log(2) / HALF_LIFE_S


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one shape within a mix."""

    isl_tokens: int
    cached_tokens: int
    osl_tokens: float
    """Expected."""
    weight: float
    """Share of the mix; all kinds' sum to 1."""


@dataclass(frozen=True, slots=True)
class Mix:
    """One model's requests: how many, and their shapes."""

    rate_per_s: float
    kinds: tuple[Kind, ...]
    itl_s: float | None = None
    """The least mean latency between tokens that a tenth or more of the requests were promised."""
    osl_tokens: float = field(init=False)
    """Mean of the expected answers."""
    isl_tokens: float = field(init=False)
    context_tokens: float = field(init=False)
    """In the cache for a decoding sequence, on the average over the time that it decodes."""
    _prefills: dict[int, tuple[float, float]] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once, and not for each worker: there are thousands of kinds.
        osl_tokens = sum(kind.weight * kind.osl_tokens for kind in self.kinds)
        tokens = sum(kind.weight * kind.osl_tokens * (kind.isl_tokens + kind.osl_tokens / 2) for kind in self.kinds)
        object.__setattr__(self, "osl_tokens", osl_tokens)
        object.__setattr__(self, "isl_tokens", sum(kind.weight * kind.isl_tokens for kind in self.kinds))
        object.__setattr__(self, "context_tokens", tokens / max(osl_tokens, 1e-9))

    def prefill(self, chunk_tokens: int) -> tuple[float, float]:
        """Steps and tokens that a prompt takes, means, where a step has at most so many tokens of it."""
        found = self._prefills.get(chunk_tokens)
        if found is None:
            new = [(kind.weight, max(1, kind.isl_tokens - kind.cached_tokens)) for kind in self.kinds]
            steps = sum(weight * -(-tokens // chunk_tokens) for weight, tokens in new)
            found = self._prefills[chunk_tokens] = steps, sum(weight * tokens for weight, tokens in new)
        return found


@dataclass(frozen=True, slots=True)
class _Arrival:
    at_s: float
    isl_tokens: int
    cached_tokens: int
    max_osl_tokens: int
    itl_s: float | None


class MixMeter:
    def __init__(self) -> None:
        self._arrivals: OrderedDict[str, deque[_Arrival]] = OrderedDict()
        self._open: OrderedDict[RequestId, tuple[str, int]] = OrderedDict()
        self._shares: dict[str, dict[int, float]] = {}
        self._overall: dict[str, float] = {}
        self._started_s: float | None = None

    def arrived(
        self,
        request_id: RequestId,
        model: str,
        *,
        isl_tokens: int,
        max_osl_tokens: int,
        now_s: float,
        cached_tokens: int = 0,
        itl_s: float | None = None,
    ) -> None:
        """A request that has not been counted before."""
        if self._started_s is None:
            self._started_s = now_s
        kept = self._arrivals.get(model)
        if kept is None:
            kept = self._arrivals[model] = deque(maxlen=MAX_ARRIVALS)
            while len(self._arrivals) > MAX_MODELS:
                gone, _ = self._arrivals.popitem(last=False)
                self._shares.pop(gone, None)
                self._overall.pop(gone, None)
        self._arrivals.move_to_end(model)
        kept.append(_Arrival(now_s, isl_tokens, min(cached_tokens, isl_tokens), max_osl_tokens, itl_s))
        self._open[request_id] = model, max_osl_tokens
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def ended(self, request_id: RequestId, osl_tokens: int) -> None:
        """That request's answer is whole."""
        known = self._open.pop(request_id, None)
        if known is None:
            return
        model, allowed = known
        share = min(1.0, osl_tokens / allowed)
        shares = self._shares.setdefault(model, {})
        bucket = allowed.bit_length()
        before = shares.get(bucket, self._overall.get(model, 1.0))
        shares[bucket] = before + max(SHARE_WEIGHT, 1.0 if bucket not in shares else 0.0) * (share - before)
        overall = self._overall.get(model)
        self._overall[model] = share if overall is None else overall + SHARE_WEIGHT * (share - overall)

    def models(self) -> tuple[str, ...]:
        return tuple(sorted(self._arrivals))

    def mix(self, model: str, now_s: float) -> Mix | None:
        """None: nobody asked within `WINDOW_S`."""
        kept = self._arrivals.get(model, deque())
        while kept and now_s - kept[0].at_s > WINDOW_S:
            kept.popleft()
        if not kept:
            return None
        weights = [math.exp(-_DECAY * max(0.0, now_s - arrival.at_s)) for arrival in kept]
        total = sum(weights)
        since_s = now_s - (kept[0].at_s if len(kept) == MAX_ARRIVALS else (self._started_s or 0.0))
        seen = 1.0 - math.exp(-_DECAY * max(since_s, 1.0))
        kinds = [
            Kind(arrival.isl_tokens, arrival.cached_tokens, self._expected(model, arrival), weight / total)
            for arrival, weight in zip(kept, weights, strict=True)
        ]
        return Mix(rate_per_s=total * _DECAY / seen, kinds=_merged(kinds), itl_s=_promised(kept, weights))

    def check_invariants(self) -> None:
        assert len(self._open) <= MAX_OPEN
        assert len(self._arrivals) <= MAX_MODELS
        assert all(0 <= share <= 1 for shares in self._shares.values() for share in shares.values())

    def _expected(self, model: str, arrival: _Arrival) -> float:
        shares = self._shares.get(model, {})
        share = shares.get(arrival.max_osl_tokens.bit_length(), self._overall.get(model, 1.0))
        return max(1.0, share * arrival.max_osl_tokens)


def _merged(kinds: Iterable[Kind]) -> tuple[Kind, ...]:
    """Equal shapes as one."""
    weights: dict[tuple[int, int, float], float] = {}
    for kind in kinds:
        shape = kind.isl_tokens, kind.cached_tokens, kind.osl_tokens
        weights[shape] = weights.get(shape, 0.0) + kind.weight
    return tuple(Kind(*shape, weight) for shape, weight in weights.items())


def _promised(arrivals: Iterable[_Arrival], weights: list[float]) -> float | None:
    promised = sorted((a.itl_s, w) for a, w in zip(arrivals, weights, strict=True) if a.itl_s is not None)
    least = 0.1 * sum(weights)
    so_far = 0.0
    for itl_s, weight in promised:
        so_far += weight
        if so_far >= least:
            return itl_s
    return None
