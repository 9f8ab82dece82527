"""Why this plan: in words and in what another server would change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus_planner.cost import kv
from isthmus_planner.cost.laws import decode_law
from isthmus_planner.cost.layout import Layout
from isthmus_planner.plan.capacity import Offer, Offers, credit_window_chunks, pacing_bytes_per_s, receive_s_per_byte
from isthmus_planner.plan.options import Option
from isthmus_planner.plan.search import Assignment, Wish, assign
from isthmus_planner.plan.simulating import Bench
from isthmus_planner.sim.hardware import Role

WAYS_OUT = "relax ttft_ms or itl_ms, shorten the requests, raise tp, or add a node type with more memory"
EXTRAPOLATED = ", extrapolated ("
"""As a calibration marks constants that are asked beyond what was measured."""
EVEN = 0.02
"""Relative difference below which two plans are called equal."""


@dataclass(frozen=True, slots=True)
class OneMore:
    """One server more of a type, with all roles chosen anew."""

    node_type: str
    requests_per_s: float
    """Gained."""
    share: float
    """Of the plan's rate."""


@dataclass(frozen=True, slots=True)
class LaneSettings:
    node_type: str
    block_tokens: int
    pace_bytes_per_s: float
    """Into one decode replica, all lanes together."""
    need_bytes_per_s: float
    """Mean."""
    credit_window_chunks: int
    max_batch: int


@dataclass(frozen=True, slots=True)
class Settings:
    lanes: tuple[LaneSettings, ...]


def refusals(offers: Sequence[Offers]) -> str:
    return "\n".join(f"{each.node.name}: {_refused(each) or 'no role within the targets'}" for each in offers)


def verdict(best: Option, aggregated: Option | None, split: Option | None, wanted_per_s: float | None) -> str:
    """One sentence that says what to do."""
    rate = best.steady_requests_per_s
    other = aggregated if best.assignment.disaggregated else split
    text = f"{_what(best)}{_compared(best, aggregated, split)}."
    if other is not None and best.requests_per_s.p90 < other.requests_per_s.p50:
        text += " The model's error is larger than that difference: measure before you rely on it."
    if wanted_per_s is not None and rate < wanted_per_s * (1 - EVEN):
        text += f" This cluster serves {rate:.4g} of the {wanted_per_s:.4g} requests per second that are wanted."
    if best.simulated is not None and not best.simulated.within_targets:
        text += " The simulator does not find the targets met at any load tried."
    return text


def _what(best: Option) -> str:
    if not best.assignment.disaggregated:
        return "Stay aggregated"
    whole = best.assignment.total(Role.AGGREGATED) == 0
    return "Disaggregate" if whole else "Disaggregate in part, and leave the rest aggregated"


def _compared(best: Option, aggregated: Option | None, split: Option | None) -> str:
    crosses = best.assignment.disaggregated
    other, name = (aggregated, "the best aggregated plan") if crosses else (split, "the best split")
    if other is None:
        return f": {name} is not possible here"
    ratio = _ratio(best.steady_requests_per_s, other.steady_requests_per_s)
    same_servers = best.assignment.usd_per_h == other.assignment.usd_per_h
    if same_servers and abs(ratio - 1) <= EVEN:
        return f": as fast as {name}, within {EVEN:.0%}"
    text = f": {ratio:.2f} times the throughput"
    if not same_servers:
        text += f" and {ratio * _hourly(other) / _hourly(best):.2f} times the tokens per dollar"
    return f"{text} of {name}"


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0 else float("inf")


def _hourly(option: Option) -> float:
    """Only compared where both are known."""
    return option.assignment.usd_per_h or 1.0


def reasons(offers: Sequence[Offers], best: Option, fastest: Assignment, fractional: Assignment) -> tuple[str, ...]:
    """`fastest`: the plan with the most throughput; `fractional`: the same with servers divided between roles."""
    lines = [f"Bottleneck by the closed forms: {best.bottleneck}."]
    if best.simulated is not None:
        lines.append(f"In the simulator requests are longest in: {best.simulated.bottleneck}.")
        if not best.simulated.steady:
            lines.append("Too many requests are under way to simulate them to a steady state: trust the closed forms.")
    else:
        lines.append("Too many replicas to simulate within a plan's time: the closed forms stand alone.")
    advantage = _advantage(offers)
    if advantage:
        lines.append(advantage)
    gain = fractional.requests_per_s / fastest.requests_per_s - 1
    if gain > EVEN:
        divided = _divided(offers, fractional)
        lines.append(f"Dividing servers between roles ({divided}) would give {gain:.0%} more than whole ones can.")
    lines += _origins(offers, best.assignment)
    lines += [f"{each.node.name} cannot take every role ({_refused(each)})." for each in offers if each.refused]
    return tuple(lines)


def _origins(offers: Sequence[Offers], assignment: Assignment) -> list[str]:
    """Of what the plan makes use of and no measurement covers, with the error to expect."""
    unsure: dict[str, list[str]] = {}
    for each, counts in zip(offers, assignment.counts, strict=True):
        for role, offer in each.by_role.items():
            if counts[role] > 0 and not offer.constants.calibrated:
                spread = max(offer.constants.spread_of(quantity) for quantity in ("tpot", "throughput"))
                why = f"{_origin(offer.constants.source)}; p90 is {spread:.2f} times p50"
                unsure.setdefault(why, []).append(f"{each.node.name} {role.value}")
    return [f"Not calibrated: {', '.join(who)}: {why}." for why, who in unsure.items()]


def _origin(source: str) -> str:
    """Without the name of the file that the measurements came from; with what was asked beyond them."""
    return source.removesuffix(")").split(EXTRAPOLATED)[-1] if EXTRAPOLATED in source else source.split(" (")[0]


def _refused(each: Offers) -> str:
    """Why a type cannot take some role, at its largest tp; the JSON has all of it."""
    lasts: dict[str, list[str]] = {}
    for role, whys in each.refused.items():
        lasts.setdefault(whys[-1] if whys else "no layout", []).append(role.value)
    return "; ".join(f"{' and '.join(roles)}: {why}" for why, roles in lasts.items())


def _advantage(offers: Sequence[Offers]) -> str:
    """Who prefills: the types in the order of decode rate given up for prefill rate."""
    both = [each for each in offers if each.rate(Role.PREFILL) > 0 and each.rate(Role.DECODE) > 0]
    if len(both) < 2:
        return ""
    ordered = sorted(both, key=lambda each: each.rate(Role.DECODE) / each.rate(Role.PREFILL))
    parts = [f"{each.node.name} {each.rate(Role.DECODE) / each.rate(Role.PREFILL):.2f}" for each in ordered]
    return f"Requests of decode given up for one of prefill, least first: {', '.join(parts)}."


def _divided(offers: Sequence[Offers], assignment: Assignment) -> str:
    parts = []
    for each, counts in zip(offers, assignment.counts, strict=True):
        whole = all(value == round(value) for value in counts.values())
        if not whole:
            shares = ", ".join(f"{value:.2f} {role.value}" for role, value in counts.items() if value > 0)
            parts.append(f"{each.node.name}: {shares}")
    return "; ".join(parts) or "none"


def one_more(offers: Sequence[Offers], best: Assignment) -> tuple[OneMore, ...]:
    base = assign(offers, Wish())
    assert base is not None
    found = []
    for index, each in enumerate(offers):
        more = assign(offers, Wish(), extra=index)
        gained = max(0.0, more.requests_per_s - base.requests_per_s) if more is not None else 0.0
        found.append(OneMore(each.node.name, gained, gained / best.requests_per_s))
    return tuple(found)


def settings(offers: Sequence[Offers], best: Option, bench: Bench) -> Settings | None:
    """For each type that decodes what crossed."""
    if not best.assignment.disaggregated:
        return None
    lanes = [
        _lane(each, each.by_role[Role.DECODE], bench)
        for each, counts in zip(offers, best.assignment.counts, strict=True)
        if counts[Role.DECODE] > 0
    ]
    return Settings(tuple(lanes))


def _lane(offers: Offers, offer: Offer, bench: Bench) -> LaneSettings:
    node = offers.node
    layout = Layout(tp=offer.tp, kv=bench.kv_precision)
    law = decode_law(node.accelerator, bench.model, layout, offer.constants)
    ranks = kv.shard(bench.model, layout)
    descriptor_bytes = offer.block_tokens * kv.layer_bytes_per_token(bench.model, layout) / ranks
    bandwidth = node.accelerator.need("memory_bytes_per_s", "decode")
    cost = receive_s_per_byte(bench.relay, descriptor_bytes, ranks, bandwidth)
    step_s = float(law.step_s(offer.max_batch, offer.max_batch * bench.mix.context_tokens))
    pace = pacing_bytes_per_s(offer.receive_bytes_per_s, step_s, bench.targets.itl_s, cost)
    descriptors = max(1, math.ceil(bench.relay.chunk_bytes / descriptor_bytes))
    return LaneSettings(
        node_type=node.name,
        block_tokens=offer.block_tokens,
        pace_bytes_per_s=pace,
        need_bytes_per_s=offer.receive_bytes_per_s,
        credit_window_chunks=credit_window_chunks(pace, bench.relay, descriptors),
        max_batch=offer.max_batch,
    )
