"""A cluster in the middle of its upgrade: processes of this release and of the one before, on one bus."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from isthmus_ingress.service import Ingress
from isthmus_shared.bus.memory import MemoryBroker
from isthmus_shared.bus.port import Bus
from isthmus_shared.bus.previous import PreviousVersionBus
from isthmus_shared.messages.base import PREVIOUS, VERSION
from isthmus_testing.fake_cluster import FakeCluster, say
from isthmus_testing.ingress import running_ingress
from isthmus_testing.old_release import OldReleaseBus
from isthmus_testing.waiting import eventually

TEXT = "the whole answer"
SAMPLES = Path(__file__).parents[2] / "unit" / "shared" / "messages_1.json"


def old(bus: Bus) -> OldReleaseBus:
    samples = json.loads(SAMPLES.read_text())
    return OldReleaseBus(bus, {kind: bytes.fromhex(text) for kind, text in samples.items()})


@asynccontextmanager
async def mixed(
    folder: Path, cluster_bus: Bus, ingress_bus: Bus, *, wire_version: int
) -> AsyncIterator[tuple[Ingress, FakeCluster]]:
    cluster = FakeCluster(cluster_bus, script=say(TEXT), names=("p1", "p2", "d1", "d2"))
    settings = {"wire_version": wire_version, "wait_for_model": False}
    async with cluster.running(), running_ingress(ingress_bus, folder, **settings) as ingress:
        await cluster.beat()
        await eventually(lambda: bool(ingress.roster.models), what="the workers' heartbeats")
        yield ingress, cluster
    assert cluster.held == {}


async def answer_of(ingress: Ingress) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 1}
    async with httpx.AsyncClient(timeout=20) as http:
        response = await http.post(f"http://{ingress.address}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("fault", [None, "die_after", "lose_token"])
async def test_an_upgraded_ingress_serves_on_workers_and_a_planner_that_are_not(
    folder: Path, fault: str | None
) -> None:
    broker = MemoryBroker()
    theirs = old(broker.client("cluster"))
    async with mixed(folder, theirs, broker.client("ingress"), wire_version=PREVIOUS) as (ingress, cluster):
        if fault is not None:
            setattr(cluster.workers["d1"].faults, fault, 3)
        assert await answer_of(ingress) == TEXT
        await eventually(lambda: not cluster.held)
    assert theirs.refused == []
    assert theirs.heard >= {"route_request", "submit_prefill", "submit_decode", "start_decode"}


async def test_upgraded_workers_and_planner_serve_an_ingress_that_is_not(folder: Path) -> None:
    broker = MemoryBroker()
    theirs = old(broker.client("ingress"))
    ours = PreviousVersionBus(broker.client("cluster"))
    async with mixed(folder, ours, theirs, wire_version=VERSION) as (ingress, _):
        assert await answer_of(ingress) == TEXT
    assert theirs.refused == []
    assert theirs.heard >= {"route_reply", "submit_reply", "ack", "step_events", "worker_heartbeat"}


async def test_then_each_is_told_to_speak_the_new_version_one_after_the_other(folder: Path) -> None:
    broker = MemoryBroker()
    still_old = PreviousVersionBus(broker.client("cluster"))
    async with mixed(folder, still_old, broker.client("ingress"), wire_version=VERSION) as (ingress, cluster):
        cluster.workers["d1"].faults.die_after = 3
        assert await answer_of(ingress) == TEXT


async def test_without_the_setting_the_release_before_refuses_what_it_hears(folder: Path) -> None:
    """What the setting is for."""
    broker = MemoryBroker()
    theirs = old(broker.client("cluster"))
    body = {"model": "tiny", "prompt": "hi"}
    async with (
        mixed(folder, theirs, broker.client("ingress"), wire_version=VERSION) as (ingress, _),
        httpx.AsyncClient(timeout=20) as http,
    ):
        response = await http.post(f"http://{ingress.address}/v1/completions", json=body)
    assert response.status_code in (503, 504)
    assert any("version 2" in text for text in theirs.refused)
