"""SLO classes at the front doors: what the planner is asked, and what a client hears when it is not to be."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus_shared.errors import SloUnattainable
from isthmus_testing.fake_cluster import FakeCluster
from isthmus_testing.ingress import ingress_stack

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-batch-0123456789"
CLASSES = (
    {"name": "fast", "ttft_s": 2.0, "itl_s": 0.1, "priority": 10},
    {"name": "usual", "ttft_s": 9.0, "default": True},
    {"name": "batch", "priority": -10},
)


@asynccontextmanager
async def served(folder: Path, *, keys: bool = False) -> AsyncIterator[tuple[httpx.AsyncClient, FakeCluster]]:
    classes = folder / "classes.jsonl"
    classes.write_text("\n".join(json.dumps(line) for line in CLASSES))
    settings: dict[str, Any] = {"slo_classes": classes}
    if keys:
        settings["tenants"] = folder / "tenants.jsonl"
        settings["tenants"].write_text(json.dumps({"name": "acme", "key": KEY, "slo_class": "batch"}))
    async with (
        ingress_stack(folder, "ok", settings=settings) as (ingress, cluster, _),
        httpx.AsyncClient(base_url=f"http://{ingress.address}", timeout=20) as http,
    ):
        yield http, cluster


@pytest.mark.parametrize(
    ("body", "headers", "wanted"),
    [
        ({}, {}, "usual"),
        ({}, {"x-isthmus-slo-class": "fast"}, "fast"),
        ({"slo_class": "batch"}, {"x-isthmus-slo-class": "fast"}, "batch"),
    ],
)
async def test_the_planner_is_told_the_class_of_a_request(
    folder: Path, body: dict[str, Any], headers: dict[str, str], wanted: str
) -> None:
    async with served(folder) as (http, cluster):
        assert (await http.post(CHAT, json={**GOOD, **body}, headers=headers)).status_code == 200
        (asked,) = cluster.routes
        assert asked.slo is not None
        assert asked.slo.name == wanted
        assert asked.waited_s == 0.0
        assert asked.patience_s > 0


async def test_a_keys_class_is_its_requests_and_bounds_what_they_may_name(folder: Path) -> None:
    async with served(folder, keys=True) as (http, cluster):
        headers = {"authorization": f"Bearer {KEY}"}
        assert (await http.post(CHAT, json=GOOD, headers=headers)).status_code == 200
        assert cluster.routes[0].slo is not None
        assert (cluster.routes[0].slo.name, cluster.routes[0].tenant) == ("batch", "acme")
        for name, why in (("fast", "may not ask"), ("faster", "is no SLO class")):
            refused = await http.post(CHAT, json={**GOOD, "slo_class": name}, headers=headers)
            assert refused.status_code == 400
            assert why in refused.json()["error"]["message"]
            assert refused.json()["error"]["param"] == "slo_class"


async def test_a_request_in_line_asks_again_with_what_it_has_waited_and_is_served(folder: Path) -> None:
    async with served(folder) as (http, cluster):
        cluster.asks_in_line = 3
        answer = await http.post(CHAT, json=GOOD)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
        waited = [asked.waited_s for asked in cluster.routes]
        assert len(waited) == 4
        assert waited[0] == 0.0
        assert waited == sorted(waited)
        assert waited[3] >= 0.3


async def test_a_target_that_cannot_be_met_is_a_429_at_once_with_the_time_to_come_back(folder: Path) -> None:
    async with served(folder) as (http, cluster):
        cluster.planner_fault = SloUnattainable("the first token would come too late", retry_after_s=3.2)
        refused = await http.post(CHAT, json=GOOD)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "4"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "slo_unattainable")
        assert len(cluster.routes) == 1
