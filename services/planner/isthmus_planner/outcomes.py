"""What was predicted beside what really happened, per model and worker; and the correction that follows. Pure.

The time to the first token belongs to the worker that prefills, the latency between tokens to the one that decodes.
A prediction is made of a worker's steps; what is no step (a tokenizer's queue, the bus, an engine's front end) shows
only in what clients saw. So each worker has a correction: a time that comes on top of a first token, and a factor for
the latency between tokens. Both are quantiles, followed a little step for each outcome: outliers count like others.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from isthmus_shared.ids import Incarnation, RequestId
from isthmus_shared.messages.health import Foreseen
from isthmus_shared.messages.outcomes import Outcome

RECENT = 200
"""Requests that medians are taken of."""
MAX_MODELS = 256
MAX_MADE = 65_536
"""Predictions whose outcome is still to come; those forgotten, and another replica's, teach nothing."""
BASE_QUANTILE = 0.35
"""Of what first tokens took beyond prediction: what delays some of them is queueing, which only adds."""
BASE_STEP_S = 0.02
"""Of the first outcome; of the n-th 1/n of it, at least `LEAST_SHARE`."""
LEAST_SHARE = 0.02
MOST_BASE_S = 1.0
FACTOR_STEP = (0.1, 0.004)
"""Of the logarithm, by the first outcome and at least: two hundred of one kind make a factor of 1.5, no burst does."""
FACTORS = (0.7, 1.5)
"""Beyond, something else is wrong, and the steps themselves will show it."""


@dataclass(slots=True)
class Latency:
    """One kind of latency of one model or worker."""

    pairs: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """(actual, predicted) seconds."""

    def foreseen(self) -> Foreseen | None:
        if not any(actual > 0 for actual, _ in self.pairs):
            return None
        return Foreseen(
            requests=len(self.pairs),
            actual_p50_s=statistics.median(actual for actual, _ in self.pairs),
            predicted_p50_s=statistics.median(predicted for _, predicted in self.pairs),
            error=statistics.median(abs(predicted / actual - 1.0) for actual, predicted in self.pairs if actual > 0),
        )


@dataclass(slots=True)
class Base:
    """`raw + value_s`"""

    value_s: float = 0.0
    learned: int = 0

    def learn(self, actual_s: float, raw_s: float) -> None:
        self.learned += 1
        step_s = BASE_STEP_S * max(LEAST_SHARE, 1.0 / self.learned)
        up = actual_s - raw_s > self.value_s
        moved_s = self.value_s + step_s * (BASE_QUANTILE if up else BASE_QUANTILE - 1.0)
        self.value_s = max(0.0, min(MOST_BASE_S, moved_s))


@dataclass(slots=True)
class Factor:
    """`raw * value`"""

    value: float = 1.0
    learned: int = 0

    def learn(self, actual_s: float, raw_s: float) -> None:
        self.learned += 1
        first, least = FACTOR_STEP
        step = math.exp(0.5 * max(least, first / self.learned))
        moved = self.value * (step if actual_s > self.value * raw_s else 1.0 / step)
        self.value = max(FACTORS[0], min(FACTORS[1], moved))


@dataclass(frozen=True, slots=True)
class Made:
    """What a prediction that goes out has in it, and what its outcome may teach."""

    base_s: float
    factor: float
    tells_base: bool
    """It is hardly a wait for others' prompts."""
    tells_factor: bool
    """It was made of steps that had been learned."""


@dataclass(slots=True)
class _Worker:
    ttft: Latency = field(default_factory=Latency)
    itl: Latency = field(default_factory=Latency)
    base: Base = field(default_factory=Base)
    factor: Factor = field(default_factory=Factor)


@dataclass(slots=True)
class _Model:
    ttft: Latency = field(default_factory=Latency)
    itl: Latency = field(default_factory=Latency)


class Accuracy:
    """As many workers as live: `keep` drops the lives that have ended."""

    def __init__(self) -> None:
        self._workers: dict[Incarnation, _Worker] = {}
        self._models: OrderedDict[str, _Model] = OrderedDict()
        self._made: OrderedDict[RequestId, Made] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def made(
        self, request: RequestId, first: Incarnation, decode: Incarnation, *, tells_base: bool, tells_factor: bool
    ) -> None:
        """A prediction goes out, with the present corrections of these two in it."""
        base, _ = self.correction(first)
        _, factor = self.correction(decode)
        self._made[request] = Made(base, factor, tells_base, tells_factor)
        while len(self._made) > MAX_MADE:
            self._made.popitem(last=False)

    def take(self, outcome: Outcome) -> None:
        """One that was routed more than once tells nothing of a single route, and is left out."""
        predicted, decode = outcome.predicted, outcome.decode
        made = self._made.pop(outcome.request_id, None)
        if predicted is None or decode is None or outcome.attempts != 1:
            return
        first = decode if outcome.prefill is None else outcome.prefill
        model = self._model(outcome.model)
        if outcome.ttft_s is not None:
            actual_s = max(0.0, outcome.ttft_s - outcome.queued_s)  # what it waited in line was not predicted
            worker = self._workers.setdefault(first.incarnation, _Worker())
            for latency in (worker.ttft, model.ttft):
                latency.pairs.append((actual_s, predicted.ttft_p50_s))
            if made is not None and made.tells_base:
                worker.base.learn(actual_s, max(0.0, predicted.ttft_p50_s - made.base_s))
        if outcome.itl_s is not None:
            worker = self._workers.setdefault(decode.incarnation, _Worker())
            for latency in (worker.itl, model.itl):
                latency.pairs.append((outcome.itl_s, predicted.itl_p50_s))
            if made is not None and made.tells_factor:
                worker.factor.learn(outcome.itl_s, predicted.itl_p50_s / made.factor)

    def correction(self, life: Incarnation) -> tuple[float, float]:
        """(seconds on top of a first token, factor of the latency between tokens)"""
        worker = self._workers.get(life)
        return (0.0, 1.0) if worker is None else (worker.base.value_s, worker.factor.value)

    def of_worker(self, life: Incarnation) -> tuple[Foreseen | None, Foreseen | None]:
        """(TTFT, ITL)."""
        worker = self._workers.get(life)
        return (None, None) if worker is None else (worker.ttft.foreseen(), worker.itl.foreseen())

    def of_model(self, model: str) -> tuple[Foreseen | None, Foreseen | None]:
        known = self._models.get(model)
        return (None, None) if known is None else (known.ttft.foreseen(), known.itl.foreseen())

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self._models)

    def keep(self, alive: Iterable[Incarnation]) -> None:
        wanted = set(alive)
        self._workers = {life: worker for life, worker in self._workers.items() if life in wanted}

    def _model(self, name: str) -> _Model:
        known = self._models.get(name)
        if known is None:
            known = self._models[name] = _Model()
            while len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
        return known
