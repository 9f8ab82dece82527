"""What a run came to: latencies as percentiles, goodput under targets, errors by kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from isthmus_cli.load.connection import Outcome
from isthmus_cli.load.histogram import Histogram

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class Targets:
    """Of an answer: its first token, and the mean and longest wait between two tokens; None: no such target."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def met(self, outcome: Outcome) -> bool:
        if outcome.error is not None or outcome.first_s is None:
            return False
        if self.ttft_s is not None and outcome.first_s - outcome.asked_s > self.ttft_s:
            return False
        mean_s = mean_itl_s(outcome)
        return self.itl_s is None or mean_s is None or mean_s <= self.itl_s


def mean_itl_s(outcome: Outcome) -> float | None:
    if outcome.first_s is None or outcome.last_s is None or outcome.tokens < 2:
        return None
    return (outcome.last_s - outcome.first_s) / (outcome.tokens - 1)


@dataclass(slots=True)
class Report:
    """Fed with outcomes; those that ended within the measured window count."""

    targets: Targets
    from_s: float
    until_s: float = float("inf")
    requests: int = 0
    good: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)
    per_second: Counter[int] = field(default_factory=Counter)
    """Tokens of answers that ended in each second of the window."""
    first_end_s: float = float("inf")
    last_end_s: float = 0.0

    def take(self, outcome: Outcome) -> None:
        if not self.from_s <= outcome.ended_s <= self.until_s:
            return
        self.requests += 1
        self.first_end_s = min(self.first_end_s, outcome.ended_s)
        self.last_end_s = max(self.last_end_s, outcome.ended_s)
        if outcome.error is not None:
            self.errors[outcome.error] += 1
            return
        self.tokens += outcome.tokens
        self.prompt_tokens += outcome.prompt_tokens
        self.per_second[int(outcome.ended_s - self.from_s)] += outcome.tokens
        self.good += self.targets.met(outcome)
        if outcome.first_s is not None:
            self.ttft.record(max(0.0, outcome.first_s - outcome.asked_s))
        for gap_s, tokens in outcome.gaps:
            self.itl.record(gap_s / tokens, tokens)
        self.e2e.record(max(0.0, outcome.ended_s - outcome.asked_s))

    @property
    def seconds(self) -> float:
        end_s = self.until_s if self.until_s != float("inf") else max(self.last_end_s, self.from_s)
        return max(1e-9, end_s - self.from_s)

    def as_json(self, **about: Any) -> dict[str, Any]:
        answered = self.requests - self.errors.total()
        return {
            **about,
            "seconds": round(self.seconds, 3),
            "requests": self.requests,
            "answered": answered,
            "errors": dict(sorted(self.errors.items())),
            "requests_per_s": round(answered / self.seconds, 3),
            "output_tokens": self.tokens,
            "output_tokens_per_s": round(self.tokens / self.seconds, 2),
            "prompt_tokens": self.prompt_tokens,
            "targets": {"ttft_s": self.targets.ttft_s, "itl_s": self.targets.itl_s},
            "good_requests": self.good,
            "goodput_requests_per_s": round(self.good / self.seconds, 3),
            "ttft_s": _quantiles(self.ttft),
            "itl_s": _quantiles(self.itl),
            "e2e_s": _quantiles(self.e2e),
        }

    def as_text(self) -> str:
        answered = self.requests - self.errors.total()
        lines = [
            f"{answered} of {self.requests} requests answered in {self.seconds:.1f} s: "
            f"{answered / self.seconds:.1f} requests/s, {self.tokens / self.seconds:.0f} output tokens/s"
        ]
        if self.targets != Targets():
            share = self.good / self.requests if self.requests else 0.0
            lines.append(f"within the targets: {self.good} ({share:.1%}), {self.good / self.seconds:.1f} requests/s")
        columns = ["mean", *(f"p{share * 100:g}" for share in QUANTILES), "max"]
        lines.append(f"{'ms':6}" + "".join(f"{column:>10}" for column in columns))
        for name, histogram in (("TTFT", self.ttft), ("ITL", self.itl), ("E2E", self.e2e)):
            values = [histogram.mean_s, *(histogram.quantile(share) for share in QUANTILES)]
            values.append(histogram.max_s if histogram.count else None)
            lines.append(f"{name:6}" + "".join(f"{'-' if v is None else f'{v * 1e3:.2f}':>10}" for v in values))
        lines += [f"error {kind}: {count}" for kind, count in self.errors.most_common()]
        return "\n".join(lines)


def _quantiles(histogram: Histogram) -> dict[str, Any] | None:
    if not histogram.count:
        return None
    told = {f"p{share * 100:g}": histogram.quantile(share) for share in QUANTILES}
    values = {"mean": histogram.mean_s, "min": histogram.min_s, **told, "max": histogram.max_s}
    buckets = [[round(bound_s, 9), count] for bound_s, count in histogram.buckets()]
    rounded = {name: None if value is None else round(value, 9) for name, value in values.items()}
    return {"count": histogram.count, **rounded, "buckets": buckets}
