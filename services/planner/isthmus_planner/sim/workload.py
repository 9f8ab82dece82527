"""What arrives: streams of requests, each with its arrivals, its lengths and its bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from isthmus_planner.sim.hardware import require, require_number

QUANTILE_POINTS = 513
"""Of a length's distribution, joined by straight lines: 512 equal parts err by far less than a token's worth."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts, as its quantiles at equal steps from 0 to 1."""

    quantiles: tuple[int, ...]

    def __post_init__(self) -> None:
        require(len(self.quantiles) > 0, "a length has no figures; give at least one")
        require(self.quantiles[0] >= 1, f"a length of {self.quantiles[0]} tokens; the least is 1")
        ordered = all(low <= high for low, high in zip(self.quantiles, self.quantiles[1:], strict=False))
        require(ordered, "a length's quantiles fall; give them in order")

    @classmethod
    def constant(cls, tokens: int) -> Lengths:
        return cls((tokens,))

    @classmethod
    def uniform(cls, low: int, high: int) -> Lengths:
        """Both included."""
        return cls((low, high))

    @classmethod
    def lognormal(cls, mean: float, cv: float, *, most: int = 1 << 20) -> Lengths:
        """`cv`: standard deviation over mean. Outside 1 to `most` it is cut."""
        require_number("mean length", mean, at_least=1)
        require_number("cv of a length", cv, above=0)
        sigma = math.sqrt(math.log(1 + cv * cv))
        normal = NormalDist(math.log(mean) - sigma * sigma / 2, sigma)
        inner = [normal.inv_cdf((point + 0.5) / QUANTILE_POINTS) for point in range(QUANTILE_POINTS)]
        return cls(tuple(min(most, max(1, round(math.exp(value)))) for value in inner))

    @classmethod
    def of(cls, samples: Sequence[int]) -> Lengths:
        """What was seen."""
        require(len(samples) > 0, "no lengths were seen; give at least one")
        ordered = sorted(samples)
        if len(ordered) <= QUANTILE_POINTS:
            return cls(tuple(ordered))
        steps = QUANTILE_POINTS - 1
        return cls(tuple(ordered[point * (len(ordered) - 1) // steps] for point in range(QUANTILE_POINTS)))

    @property
    def most(self) -> int:
        return self.quantiles[-1]

    @property
    def mean(self) -> float:
        if len(self.quantiles) == 1:
            return float(self.quantiles[0])
        pairs = zip(self.quantiles, self.quantiles[1:], strict=False)
        return sum((low + high) / 2 for low, high in pairs) / (len(self.quantiles) - 1)


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Each of `clients` sends its next request when its last one has ended, as far as the rate allows."""

    clients: int
    rate_per_s: float = math.inf
    """Requests come into being as a Poisson process of this rate, and wait for a free client."""

    def __post_init__(self) -> None:
        require_number("ClosedLoop.clients", self.clients, at_least=1)
        require_number("ClosedLoop.rate_per_s", self.rate_per_s, above=0)


@dataclass(frozen=True, slots=True)
class Poisson:
    rate_per_s: float

    def __post_init__(self) -> None:
        require_number("Poisson.rate_per_s", self.rate_per_s, above=0)
        require(math.isfinite(self.rate_per_s), "Poisson.rate_per_s is infinite; use ClosedLoop for full load")


@dataclass(frozen=True, slots=True)
class Bursty:
    """Bursts of `burst` requests at once, as a Poisson process whose mean is `rate_per_s` requests."""

    rate_per_s: float
    burst: int

    def __post_init__(self) -> None:
        require_number("Bursty.rate_per_s", self.rate_per_s, above=0)
        require(math.isfinite(self.rate_per_s), "Bursty.rate_per_s is infinite; give requests per second")
        require_number("Bursty.burst", self.burst, at_least=1)


@dataclass(frozen=True, slots=True)
class FromTrace:
    """Times, lengths and block hashes come from the records that `simulate` is given beside the scenario."""

    time_scale: float = 1.0
    """Of the gaps; 0.5 doubles the rate."""

    def __post_init__(self) -> None:
        require_number("FromTrace.time_scale", self.time_scale, above=0)


Arrivals = ClosedLoop | Poisson | Bursty | FromTrace


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """With this probability, this part of a prompt is cached wherever it goes."""

    probability: float
    fraction: float

    def __post_init__(self) -> None:
        require(0 <= self.probability <= 1, f"PrefixHits.probability is {self.probability}; give 0 to 1")
        require(0 <= self.fraction < 1, f"PrefixHits.fraction is {self.fraction}; give 0 to below 1")


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of one kind for one model."""

    arrivals: Arrivals
    requests: int
    """How many are sent; of a trace, at most so many."""
    isl_tokens: Lengths = Lengths((1024,))
    osl_tokens: Lengths = Lengths((1024,))
    name: str = "requests"
    model: str = ""
    warmup_requests: int = 0
    """The first so many count in no figure."""
    overhead_s: float = 0.0
    """What client, network and front end add to each request before a node sees it."""
    prefix_hits: PrefixHits | None = None
    queue_limit: int = 65_536
    """Requests of this stream in the cluster at once; further ones are refused, as admission would."""

    def __post_init__(self) -> None:
        here = f"stream {self.name!r}"
        require_number(f"{here}: requests", self.requests, at_least=1)
        require_number(f"{here}: warmup_requests", self.warmup_requests, at_least=0)
        require_number(f"{here}: queue_limit", self.queue_limit, at_least=1)
        require(self.warmup_requests < self.requests, f"{here}: all {self.requests} requests are warm-up; send more")
        require_number(f"{here}: overhead_s", self.overhead_s, at_least=0)
        require(math.isfinite(self.overhead_s), f"{here}: overhead_s is infinite; give seconds")

    @property
    def in_flight_limit(self) -> int:
        if isinstance(self.arrivals, ClosedLoop):
            return self.arrivals.clients
        return self.queue_limit
