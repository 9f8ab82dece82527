"""The page's files and its state over HTTP. What it looks like in a browser is in tests/ui."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus_shared.bus.port import BusMessage
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages import subjects
from isthmus_shared.messages.health import ClusterView, IngressHeartbeat
from isthmus_testing.ingress import ingress_stack
from isthmus_testing.waiting import eventually

CHAT = "/v1/chat/completions"


def http_of(ingress: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{ingress.address}", timeout=10, trust_env=False)


async def test_the_page_runs_no_script_but_its_own(folder: Path) -> None:
    async with ingress_stack(folder, "ok") as (ingress, _, _broker), http_of(ingress) as http:
        page = await http.get("/ui")
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        for name in ("app.js", "picture.js", "plots.js", "style.css"):
            file = await http.get(f"/ui/{name}")
            assert file.status_code == 200
            assert file.headers["x-content-type-options"] == "nosniff"
        for path in ("/ui/state.py", "/ui/../config.py", "/ui/page.html"):
            assert (await http.get(path)).status_code == 404


async def test_the_state_tells_of_requests_but_not_what_they_say(folder: Path) -> None:
    secret = "a very secret question"
    async with ingress_stack(folder, "x" * 400, step_s=0.05) as (ingress, _, _broker), http_of(ingress) as http:
        body = {"model": "tiny", "messages": [{"role": "user", "content": secret}], "max_tokens": 300}
        asking = asyncio.ensure_future(http.post(CHAT, json=body))
        await eventually(lambda: any(saga.saga.output for saga in ingress.hub.sagas), what="tokens")
        response = await http.get("/ui/state")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        (request,) = response.json()["requests"]
        assert request["state"] in ("decoding", "crossing")
        assert request["mode"] == "disaggregated"
        assert request["isl_tokens"] > len(secret)
        assert secret not in response.text
        await eventually(lambda: ingress.hub.running == 0, what="the end of the request")
        after = (await http.get("/ui/state")).json()
        assert after["requests"] == []
        assert after["latency"]["ttft"]["count"][-1] == 1
        assert after["latency"]["predicted_ttft"]["count"][-1] == 1
        assert after["latency"]["ttft"]["le"][-1] is None


async def test_a_heartbeat_tells_latencies_of_answers_that_ended_beside_what_was_predicted(folder: Path) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 300, "ignore_eos": True}
    async with ingress_stack(folder, "x" * 400, step_s=0.05) as (ingress, _, broker), http_of(ingress) as http:
        asking = asyncio.ensure_future(http.post(CHAT, json=body))
        await eventually(lambda: any(len(saga.saga.output) > 2 for saga in ingress.hub.sagas), what="tokens")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: ingress.hub.running == 0, what="the end of the request")
        assert ingress.hub.recent.itl is None, "one that was broken off says little about its pace"
        assert (await http.post(CHAT, json={**body, "max_tokens": 8})).status_code == 200
        async with asyncio.timeout(10), broker.client("reader").subscribe(subjects.HEARTBEAT_INGRESS) as beats:
            async for message in beats:
                told = IngressHeartbeat.decode(message.data)
                if told.itl is not None and told.ttft is not None:
                    break
        assert (told.ttft.requests, told.itl.requests) == (2, 1)
        assert told.itl.actual_p50_s >= 0.04, "seven steps of 0.05 s, of which the first may come with the second"


async def test_without_a_planner_the_state_says_so_and_keeps_the_last_view(folder: Path) -> None:
    view = ClusterView(planner=Incarnation("p"))
    async with ingress_stack(folder, "ok") as (ingress, _, broker), http_of(ingress) as http:
        state = (await http.get("/ui/state")).json()
        assert state["cluster"] is None
        assert "planner does not answer" in state["problem"]
        bus = broker.client("planner")

        async def answer(message: BusMessage) -> None:
            assert message.reply is not None
            await bus.publish(message.reply, view.encode())

        async with bus.subscribe(subjects.VIEW) as asked:

            async def once() -> None:
                async for message in asked:
                    await answer(message)
                    return

            serving = asyncio.ensure_future(once())
            async with asyncio.timeout(10):
                while (state := (await http.get("/ui/state")).json())["cluster"] is None:
                    pass
            await serving
        assert state["problem"] is None
        async with asyncio.timeout(10):
            while (state := (await http.get("/ui/state")).json())["problem"] is None:
                pass
        assert state["cluster"]["planner"] == "p"
        assert state["cluster_age_s"] > 0


@pytest.mark.parametrize(
    ("settings", "key", "status"),
    [
        ({}, None, 200),
        ({"api_keys": ("client",)}, None, 401),
        ({"api_keys": ("client",)}, "client", 401),
        ({"admin_keys": ("admin",)}, None, 401),
        ({"api_keys": ("client",), "admin_keys": ("admin",)}, "client", 401),
        ({"api_keys": ("client",), "admin_keys": ("other", "admin")}, "admin", 200),
    ],
)
async def test_the_state_is_for_admins_once_there_are_keys(
    folder: Path, settings: dict[str, Any], key: str | None, status: int
) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with ingress_stack(folder, "ok", settings=settings) as (ingress, _, _broker), http_of(ingress) as http:
        response = await http.get("/ui/state", headers=headers)
        assert response.status_code == status
        assert (await http.get("/metrics", headers=headers)).status_code == status
        assert (await http.get("/ui")).status_code == 200
