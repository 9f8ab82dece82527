"""A cluster file for `isthmus up` in the plan's shape: one node per server, `sim` engines, on one machine."""

from __future__ import annotations

from typing import Any

import yaml

from isthmus_planner.plan.capacity import Offer, Offers
from isthmus_planner.plan.options import Option
from isthmus_planner.plan.planning import Plan
from isthmus_planner.sim.hardware import Role
from isthmus_shared.errors import ConfigInvalid

MAX_PROCESSES = 64
"""What `isthmus up` takes: relays and workers together."""
MODES = {(True, False): "disaggregated", (False, True): "aggregated", (True, True): "auto"}
"""By whether requests cross, and whether servers stay aggregated."""
LAYOUTS = {"nvidia": "nhd:{}:fp32", "amd": "hnd:{}:fp32:packed4"}
"""As the vendors' builds keep KV."""


def cluster_text(plan: Plan) -> str:
    """YAML. Raises `ConfigInvalid` when one machine cannot hold so many processes."""
    option = plan.recommended
    nodes = [
        _node(each, role, server, plan)
        for each, counts in zip(plan.offers, option.assignment.counts, strict=True)
        for role in Role
        for server in range(round(counts[role]))
    ]
    processes = len(nodes) + sum(len(node["workers"]) for node in nodes)
    if processes > MAX_PROCESSES:
        raise ConfigInvalid(
            f"the plan has {processes} relays and workers; `isthmus up` starts at most {MAX_PROCESSES} on one machine",
            todo="plan a smaller cluster to try it out (lower `count`), in the same proportions",
        )
    fields = {
        "model": {"name": plan.model.name.lower()},
        "engine": "sim",
        "planner": {"mode": _mode(option)},
        "nodes": nodes,
    }
    head = (
        f"# Made by `isthmus plan`: {plan.verdict}\n"
        "# A rehearsal on one machine: roles and batches are the plan's; engines are `sim`, so no time is real.\n"
    )
    return head + yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=120)


def _mode(option: Option) -> str:
    return MODES[option.assignment.disaggregated, option.assignment.total(Role.AGGREGATED) > 0]


def _node(offers: Offers, role: Role, server: int, plan: Plan) -> dict[str, Any]:
    offer = offers.by_role[role]
    name = f"{_plain(offers.node.name)}-{role.value}-{server}"
    workers = [_worker(offers, offer, f"{name}-{replica}", plan) for replica in range(offer.replicas)]
    node: dict[str, Any] = {"id": name, "workers": workers}
    if role is Role.AGGREGATED:
        node["relay"] = None
    return node


def _worker(offers: Offers, offer: Offer, name: str, plan: Plan) -> dict[str, Any]:
    vendor = _plain(offers.node.accelerator.vendor)
    worker: dict[str, Any] = {
        "id": name,
        "role": "prefill" if offer.role is Role.PREFILL else "decode",
        "vendor": vendor,
        "kv_layout": LAYOUTS.get(vendor, LAYOUTS["nvidia"]).format(offer.block_tokens),
    }
    if offer.max_batch:
        worker["max_batch"] = offer.max_batch
    return worker


def _plain(name: str) -> str:
    """In the alphabet of ids."""
    kept = "".join(char if char.isascii() and char.isalnum() else "-" for char in name.lower())
    return kept.strip("-")[:24] or "node"
