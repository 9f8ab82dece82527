"""How far constants can be trusted: errors on measurements that took no part in the fit. Pure.

Three ways of leaving out: single configurations, a random half of them, and everything of one accelerator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from isthmus_planner.cost.calibration.fitting import fit
from isthmus_planner.cost.calibration.groups import QUANTITIES, Array, Group, GroupKey
from isthmus_planner.cost.calibration.hierarchy import Facts, Fits, fit_all, prior_for
from isthmus_planner.cost.calibration.parameters import constants_of
from isthmus_planner.cost.constants import Constants

SPREAD_QUANTILE = 0.9
MIN_FOR_SPREAD = 5
"""Fewer left-out measurements say nothing about a tenth of them."""
REQUESTS_PER_CLIENT = 10
"""In one InferenceMAX run."""


@dataclass(slots=True)
class Errors:
    """Signed relative errors of measurements, `measured / predicted` as logarithms, collected per quantity."""

    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, group: Group, constants: Constants) -> None:
        for name, signed in signed_errors(group, constants).items():
            self.values[name].extend(signed[np.isfinite(signed)].tolist())

    def merge(self, other: Errors) -> None:
        for name, values in other.values.items():
            self.values[name].extend(values)

    def mean(self, name: str) -> float:
        """Mean of |predicted / measured - 1|; NaN without a measurement."""
        values = self.values.get(name)
        return float(np.mean(np.abs(np.expm1(-np.array(values))))) if values else float("nan")

    def means(self) -> dict[str, float]:
        return {name: self.mean(name) for name, values in sorted(self.values.items()) if values}

    def spread(self) -> dict[str, float]:
        """Per quantity the ratio that nine in ten measurements keep to, on the bad side of the prediction."""
        return spread_of([self])


def spread_of(parts: Sequence[Errors]) -> dict[str, float]:
    """The same over several parts that count alike, however many measurements each has."""
    found = {}
    for name in QUANTITIES:
        values = [np.array(each.values[name]) for each in parts if each.values.get(name)]
        if sum(map(len, values)) >= MIN_FOR_SPREAD:
            bad = np.concatenate(values) * (-1.0 if name == "throughput" else 1.0)
            weight = np.concatenate([np.full(len(each), 1.0 / len(each)) for each in values])
            order = np.argsort(bad, kind="stable")
            reached = np.cumsum(weight[order]) >= SPREAD_QUANTILE * len(values) - 1e-9
            found[name] = float(np.exp(max(bad[order][np.argmax(reached)], 0.0)))
    return found


def signed_errors(group: Group, constants: Constants) -> dict[str, Array]:
    """ln(measured / predicted) per quantity, NaN where not measured; also `throughput_all` and `decode`.

    `throughput_all` counts runs that stood still for a while too; in `throughput_stall` they are judged with the time
    that they stood still, by their own TTFT p99, as given. `decode` is `itl`, or `tpot` where an engine puts
    several tokens into one message.
    """
    predicted = group.predict(constants)
    errors = {name: np.log(group.observed[name] / predicted[name]) for name in QUANTITIES}
    errors["throughput_all"] = np.log(group.raw_throughput / predicted["throughput"])
    run_s = REQUESTS_PER_CLIENT * predicted["e2el"]
    errors["throughput_stall"] = errors["throughput_all"] + np.log1p(group.stall_s / run_s)
    errors["decode"] = errors["itl"] if group.tokens_per_message == 1 else errors["tpot"]
    return errors


def errors_of(groups: Mapping[GroupKey, Group], constants: Mapping[GroupKey, Constants]) -> dict[GroupKey, Errors]:
    found = {key: Errors() for key in groups}
    for key, group in groups.items():
        if len(group):
            found[key].add(group, constants[key])
    return found


def leave_one_out(groups: Mapping[GroupKey, Group], fits: Fits, known: Fits, facts: Facts) -> dict[GroupKey, Errors]:
    """Each configuration judged by constants fitted to all others of its group."""
    subjects = {**facts, **{key: group.subject for key, group in groups.items()}}
    found = {}
    for key, group in groups.items():
        prior = prior_for(group.subject, {**known, **fits}, subjects)
        found[key] = Errors()
        for index in range(len(group)):
            out = np.arange(len(group)) == index
            found[key].add(group.part(out), constants_of(fit(group.part(~out), prior, start=fits[key])))
    return found


@dataclass(frozen=True, slots=True)
class HeldOut:
    judged: Mapping[GroupKey, Group]
    """The configurations that took no part in the fit; a group may be empty."""
    constants: Mapping[GroupKey, Constants]

    def errors(self) -> dict[GroupKey, Errors]:
        return errors_of(self.judged, self.constants)


def hold_out(groups: Mapping[GroupKey, Group], known: Fits, facts: Facts, *, points: int | None, seed: int) -> HeldOut:
    """Fitted to a random half of each group's configurations (or to `points` of them), to be judged on the rest."""
    generator = np.random.default_rng(seed)
    kept, judged = {}, {}
    for key, group in groups.items():
        taken = _choice(generator, len(group), (len(group) + 1) // 2 if points is None else points)
        if taken.any():
            kept[key] = group.part(taken)
        judged[key] = group.part(~taken)
    fits = fit_all(kept, known, facts)
    subjects = {**facts, **{key: group.subject for key, group in groups.items()}}
    for key, group in groups.items():
        if key not in kept:
            fits[key] = prior_for(group.subject, {**known, **{k: fits[k] for k in kept}}, subjects).middle
    return HeldOut(judged, {key: constants_of(fits[key], source="a part of the measurements") for key in groups})


def leave_one_accelerator_out(
    groups: Mapping[GroupKey, Group], *, points: int = 0, seed: int = 0
) -> dict[GroupKey, Errors]:
    """Each accelerator judged by what the others say alone (`points` = 0) or with so many points of each group."""
    found: dict[GroupKey, Errors] = {}
    for name in sorted({key.accelerator for key in groups}):
        others = {key: group for key, group in groups.items() if key.accelerator != name}
        own = {key: group for key, group in groups.items() if key.accelerator == name}
        facts = {key: group.subject for key, group in others.items()}
        found |= hold_out(own, fit_all(others, {}, {}), facts, points=points, seed=seed).errors()
    return found


def pooled(
    errors: Mapping[GroupKey, Errors], by: Callable[[GroupKey], str] = lambda key: f"{key.accelerator} {key.model}"
) -> dict[str, Errors]:
    """By pair of accelerator and model, over engines, precisions and layouts; or by what `by` says."""
    found: defaultdict[str, Errors] = defaultdict(Errors)
    for key, each in errors.items():
        found[by(key)].merge(each)
    return dict(found)


def together(errors: Iterable[Errors]) -> Errors:
    total = Errors()
    for each in errors:
        total.merge(each)
    return total


def _choice(generator: np.random.Generator, count: int, wanted: int) -> NDArray[np.bool_]:
    taken = np.zeros(count, dtype=np.bool_)
    taken[generator.permutation(count)[: min(wanted, count)]] = True
    return taken
