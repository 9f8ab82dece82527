"""A plan as JSON: the same bytes for the same inputs and seed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from isthmus_planner.plan.capacity import Offer, Offers
from isthmus_planner.plan.options import Option, Range
from isthmus_planner.plan.planning import Plan
from isthmus_planner.plan.search import Assignment
from isthmus_planner.sim.hardware import Role

FORMAT = "isthmus-plan/1"
DIGITS = 6
"""Significant ones; what is beyond them is the machine's arithmetic, not the model's."""


def plan_bytes(plan: Plan) -> bytes:
    text = json.dumps(_rounded(plan_fields(plan)), sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False)
    return text.encode() + b"\n"


def plan_fields(plan: Plan) -> dict[str, Any]:
    """Plain values."""
    names = [each.node.name for each in plan.offers]
    return {
        "format": FORMAT,
        "seed": plan.seed,
        "model": plan.model.name,
        "objective": plan.objective,
        "wanted_requests_per_s": plan.wanted_per_s,
        "targets": {"ttft_s": plan.targets.ttft_s, "itl_s": plan.targets.itl_s},
        "mix": {
            "isl_tokens": plan.mix.isl_tokens,
            "osl_tokens": plan.mix.osl_tokens,
            "kinds": [
                {"name": k.name, "share": k.share, "isl_tokens": k.isl.mean, "osl_tokens": k.osl.mean}
                for k in plan.mix.kinds
            ],
        },
        "verdict": plan.verdict,
        "reasons": list(plan.reasons),
        "recommended": option_fields(plan.recommended, names),
        "aggregated": None if plan.aggregated is None else option_fields(plan.aggregated, names),
        "disaggregated": None if plan.disaggregated is None else option_fields(plan.disaggregated, names),
        "fractional": {
            "requests_per_s": plan.fractional.requests_per_s,
            "servers": servers(plan.fractional, names),
        },
        "pareto": [option_fields(option, names) for option in plan.pareto],
        "one_more": [asdict(each) for each in plan.one_more],
        "settings": None if plan.settings is None else [asdict(lane) for lane in plan.settings.lanes],
        "node_types": [_type_fields(each) for each in plan.offers],
    }


def option_fields(option: Option, names: list[str]) -> dict[str, Any]:
    return {
        "servers": servers(option.assignment, names),
        "usd_per_h": option.assignment.usd_per_h,
        "crossing_share": option.assignment.crossing_per_s / option.assignment.requests_per_s,
        "requests_per_s": _range(option.requests_per_s),
        "output_tokens_per_s": _range(option.output_tokens_per_s),
        "total_tokens_per_s": _range(option.total_tokens_per_s),
        "usd_per_m_output_tokens": _range(option.usd_per_m_output_tokens),
        "ttft_s": _range(option.ttft_s),
        "itl_s": _range(option.itl_s),
        "calibrated": option.calibrated,
        "bottleneck": option.bottleneck,
        "simulated": None if option.simulated is None else asdict(option.simulated),
    }


def servers(assignment: Assignment, names: list[str]) -> dict[str, dict[str, float]]:
    """Only types and roles that are used."""
    used = {
        name: {role.value: count for role, count in counts.items() if count > 0}
        for name, counts in zip(names, assignment.counts, strict=True)
    }
    return {name: roles for name, roles in used.items() if roles}


def _range(value: Range | None) -> dict[str, float] | None:
    return None if value is None else {"p50": value.p50, "p90": value.p90}


def _type_fields(offers: Offers) -> dict[str, Any]:
    node = offers.node
    return {
        "name": node.name,
        "accelerator": node.accelerator.name,
        "count": node.count,
        "accelerators": node.accelerators,
        "usd_per_h": node.price_usd_per_h,
        "roles": {role.value: _offer_fields(offer) for role, offer in offers.by_role.items()},
        "refused": {role.value: list(whys) for role, whys in offers.refused.items()},
    }


def _offer_fields(offer: Offer) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "tp": offer.tp,
        "replicas": offer.replicas,
        "requests_per_s": offer.requests_per_s,
        "limit": offer.limit,
        "calibrated": offer.constants.calibrated,
        "constants": offer.constants.source,
    }
    if offer.role is not Role.PREFILL:
        fields |= {"max_batch": offer.max_batch, "itl_s": offer.itl_s}
    if offer.role is not Role.DECODE:
        fields["ttft_s"] = offer.ttft_s
    if offer.role is Role.DECODE:
        fields["block_tokens"] = offer.block_tokens
    return fields


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
