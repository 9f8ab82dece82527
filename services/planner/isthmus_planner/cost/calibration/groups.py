"""Measurements that one set of constants must explain, as arrays, and the model's answer to them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from isthmus_planner.cost import memory
from isthmus_planner.cost.calibration.measurements import Measurement
from isthmus_planner.cost.constants import Constants
from isthmus_planner.cost.laws import DecodeLaw, PrefillLaw, decode_law, prefill_law
from isthmus_planner.cost.layout import Layout, Precision
from isthmus_planner.cost.meanfield import ClosedLoop, closed_loop
from isthmus_planner.cost.profiles import AcceleratorProfile, ModelProfile
from isthmus_shared.errors import ConfigInvalid

Array: TypeAlias = NDArray[np.float64]
QUANTITIES = ("itl", "tpot", "ttft", "e2el", "throughput")
STEADY_SHARE = 0.92
"""Of Little's law; below it a run's throughput is that of a run that stood still for a while. Whole runs show 0.94
and more: their clients are not all busy at the start and at the end."""

_Law = TypeVar("_Law", DecodeLaw, PrefillLaw)


class GroupKey(NamedTuple):
    """What has constants of its own."""

    accelerator: str
    model: str
    framework: str
    precision: str
    dp_attention: bool
    expert_parallel: bool
    """Whole experts on each rank, rather than a slice of every one: other kernels, other exchanges."""

    def __str__(self) -> str:
        flags = (("dp-attention", self.dp_attention), ("expert-parallel", self.expert_parallel))
        return " ".join([*(word for word in self[:4] if word), *(word for word, on in flags if on)])


@dataclass(frozen=True, slots=True)
class Subject:
    """What a group is about, measured or not."""

    key: GroupKey
    accelerator: AcceleratorProfile
    model: ModelProfile


@dataclass(frozen=True, slots=True)
class Group:
    subject: Subject
    rows: tuple[Measurement, ...]
    tokens_per_message: int
    """What an engine puts into one message of a stream; above 1, `itl` is no latency between tokens and is not used."""
    clients: Array
    isl_tokens: Array
    osl_tokens: Array
    max_kv_tokens: Array
    observed: Mapping[str, Array]
    """Per quantity; NaN where not measured, throughput also where the run was not steady."""
    raw_throughput: Array
    stall_s: Array
    """How long a run that was not steady stood still, by its own TTFT p99 (everyone waits at once); else 0."""

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, mask: NDArray[np.bool_]) -> Group:
        """The rows that the mask names."""
        return make_group(self.subject, [row for row, taken in zip(self.rows, mask, strict=True) if taken], self)

    def predict(self, constants: Constants) -> dict[str, Array]:
        """Every quantity, as a benchmark would report it: throughput with its start and end."""
        loop = self.loop(constants)
        throughput = constants.run_share * loop.requests_per_s * self.osl_tokens
        return dict(zip(QUANTITIES, (loop.itl_s, loop.tpot_s, loop.ttft_s, loop.e2el_s, throughput), strict=True))

    def loop(self, constants: Constants) -> ClosedLoop:
        layouts = sorted({row.layout for row in self.rows}, key=str)
        index = np.array([layouts.index(row.layout) for row in self.rows])
        decode = _stacked(
            [decode_law(self.subject.accelerator, self.subject.model, each, constants) for each in layouts], index
        )
        prefill = _stacked(
            [prefill_law(self.subject.accelerator, self.subject.model, each, constants) for each in layouts], index
        )
        return closed_loop(
            decode,
            prefill,
            constants,
            self.clients,
            self.isl_tokens,
            self.osl_tokens,
            max_kv_tokens=self.max_kv_tokens,
        )


def subject_of(accelerator: AcceleratorProfile, model: ModelProfile, layout: Layout, framework: str) -> Subject:
    precision = model.weight_precision(layout).value
    key = GroupKey(accelerator.name, model.name, framework, precision, layout.dp > 1, layout.ep > 1)
    return Subject(key, accelerator, model)


def grouped(measurements: Iterable[Measurement]) -> dict[GroupKey, Group]:
    """In the order of their names."""
    rows: defaultdict[GroupKey, list[Measurement]] = defaultdict(list)
    subjects: dict[GroupKey, Subject] = {}
    for row in measurements:
        subject = subject_of(row.accelerator, row.model, row.layout, row.framework)
        subjects[subject.key] = subject
        rows[subject.key].append(row)
    return {key: make_group(subjects[key], rows[key]) for key in sorted(rows)}


def make_group(subject: Subject, rows: list[Measurement], whole: Group | None = None) -> Group:
    """`whole`: the group that these rows are a part of, which knows more about the engine than they do."""
    chunk = whole.tokens_per_message if whole else tokens_per_message(rows)

    def column(name: str) -> Array:
        return np.array([getattr(row, name) for row in rows], dtype=np.float64)

    throughput = column("output_tok_per_s")
    shares = np.array([row.steady_share for row in rows], dtype=np.float64)
    itl = column("itl_s")
    observed = {
        "itl": itl if chunk == 1 else np.full_like(itl, np.nan),
        "tpot": column("tpot_s"),
        "ttft": column("ttft_s"),
        "e2el": column("e2el_s"),
        "throughput": np.where(shares < STEADY_SHARE, np.nan, throughput),
    }
    return Group(
        subject=subject,
        rows=tuple(rows),
        tokens_per_message=chunk,
        clients=column("concurrency"),
        isl_tokens=column("isl_tokens"),
        osl_tokens=column("osl_tokens"),
        max_kv_tokens=np.array([_capacity(row) for row in rows], dtype=np.float64),
        observed=observed,
        raw_throughput=throughput,
        stall_s=np.where(shares < STEADY_SHARE, np.nan_to_num(column("ttft_p99_s")), 0.0),
    )


def tokens_per_message(rows: Iterable[Measurement]) -> int:
    """From the two latencies: the time between messages is so many times the time per token, where no prefill of
    others stretches single messages, so the greatest ratio of the group tells."""
    ratios = [row.itl_s / row.tpot_s for row in rows if np.isfinite(row.itl_s) and np.isfinite(row.tpot_s)]
    return max(1, round(max(ratios))) if ratios else 1


def _capacity(row: Measurement) -> float:
    """The most that could be held: how an engine keeps its KV is not measured, so FP8 is taken. A run that was
    measured did fit, so a model that seems not to is no bound."""
    layout = dataclasses.replace(row.layout, kv=Precision.FP8)
    try:
        return memory.fit(row.accelerator, row.model, layout).kv_tokens
    except ConfigInvalid:
        return np.inf


def _stacked(laws: list[_Law], index: NDArray[np.int_]) -> _Law:
    """One law whose numbers are arrays: entry i is that of `laws[index[i]]`."""
    first = laws[0]
    columns: dict[str, Any] = {
        each.name: np.array([getattr(law, each.name) for law in laws], dtype=np.float64)[index]
        for each in dataclasses.fields(first)
        if each.name not in ("experts", "experts_per_token", "window_tokens", "skew")
    }
    return dataclasses.replace(first, **columns)
