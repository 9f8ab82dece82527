"""A whole cluster: where its secrets must not be found, and what a client may not do to another's requests."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus_shared.bus.nats import NatsBus
from isthmus_shared.errors import BusDisconnected, BusForbidden
from isthmus_shared.ids import WorkerId
from isthmus_shared.messages import subjects
from isthmus_testing.local_cluster import LocalCluster, environment, local_cluster

ACME, OTHER, ADMIN = "sk-canary-acme-3f9a", "sk-canary-other-77c1", "sk-canary-admin-d0e2"
PROMPT = "canary-of-a-prompt"
CLUSTER = """
engine: sim
env: {{ISTHMUS_LOG_LEVEL: debug}}
ingress:
  env:
    ISTHMUS_INGRESS_TENANTS: {folder}/tenants.jsonl
    ISTHMUS_INGRESS_ADMIN_KEYS_FILE: {folder}/admin
nodes:
  - id: node-a
    workers: [{{id: prefill-a, role: prefill}}]
  - id: node-b
    workers: [{{id: decode-b, role: decode}}]
"""
CHAT = "/v1/chat/completions"


def body(**more: Any) -> dict[str, Any]:
    return {"model": "isthmus-demo", "messages": [{"role": "user", "content": PROMPT}], "ignore_eos": True, **more}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("security")
    tenants = [{"name": "acme", "key": ACME}, {"name": "other", "key": OTHER, "max_concurrent": 4}]
    (folder / "tenants.jsonl").write_text("\n".join(json.dumps(tenant) for tenant in tenants))
    (folder / "admin").write_text(ADMIN)
    (folder / "cluster.yaml").write_text(CLUSTER.format(folder=folder))
    with local_cluster([str(folder / "cluster.yaml")], folder / "state") as running:
        yield running


def secrets_of(cluster: LocalCluster) -> dict[str, str]:
    """Every secret of the cluster by what it is."""
    found = {"acme's key": ACME, "other's key": OTHER, "admin's key": ADMIN}
    for path in (Path(cluster.state.run_dir) / "secrets").iterdir():
        text = path.read_text()
        found[path.name] = text.partition("://")[2].partition("@")[0].partition(":")[2] or text
    found["operator"] = cluster.state.bus_url.partition("@")[0].rpartition(":")[2]
    found["client"] = cluster.state.client_bus_url.partition("@")[0].rpartition(":")[2]
    assert len(set(found.values())) == len(found)
    return found


def processes(cluster: LocalCluster) -> dict[str, int]:
    pids = {process.name: process.pid for process in cluster.state.processes if process.pid is not None}
    return {**pids, "supervisor": cluster.process.pid}


def seen_by_the_system(cluster: LocalCluster) -> dict[str, str]:
    """Command lines and environments, as `ps` shows them."""
    return {
        f"{what} of {name}": Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")
        for name, pid in processes(cluster).items()
        for what in ("cmdline", "environ")
    }


async def pages(cluster: LocalCluster, http: httpx.AsyncClient) -> dict[str, str]:
    """What every process shows of itself."""
    view = await cluster.view()
    addresses = {beat.worker_id: beat.http_address for beat in view.workers}
    addresses |= {f"relay-{beat.relay.node_id}": beat.http_address for beat in view.relays}
    shown = {}
    for name, address in [*addresses.items(), ("ingress", cluster.url.partition("://")[2])]:
        for page in ("health", "ready", "metrics"):
            answer = await http.get(f"http://{address}/{page}", headers=bearer(ADMIN))
            assert answer.status_code == 200
            shown[f"{name}/{page}"] = answer.text
    shown["ui/state"] = (await http.get(f"{cluster.url}/ui/state", headers=bearer(ADMIN))).text
    status = [sys.executable, "-m", "isthmus_cli", "status", "--json", "--state-dir", str(cluster.state_dir)]
    done = await asyncio.to_thread(
        lambda: subprocess.run(status, capture_output=True, text=True, env=environment(), timeout=60, check=True)
    )
    return {**shown, "isthmus status": done.stdout, "what isthmus up said": json.dumps(cluster.events)}


async def test_no_secret_shows_in_a_log_a_page_an_error_an_environment_or_a_process_list(cluster: LocalCluster) -> None:
    shown: dict[str, str] = {}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
        for key in (ACME, OTHER):
            answer = await http.post(CHAT, json=body(max_tokens=4), headers=bearer(key))
            assert answer.status_code == 200, answer.text
            shown[f"answer to {key[:9]}"] = str(answer.headers)
        for number, (headers, bad) in enumerate(
            [
                (bearer(ACME + "x"), body()),
                ({"authorization": ACME}, body()),
                (bearer(ACME), body(model="no-such")),
                (bearer(ACME), body(temperature="hot")),
                (bearer(ACME), {"key": ACME}),
            ]
        ):
            refused = await http.post(CHAT, json=bad, headers=headers)
            assert 400 <= refused.status_code < 500
            shown[f"error {number}"] = refused.text
        bus = await NatsBus.connect(cluster.state.client_bus_url, name="test")
        async with bus:
            for key in (ACME, "wrong-" + ACME):
                told = await bus.request(
                    subjects.API_CHAT, json.dumps(body(max_tokens=2)).encode(), timeout_s=60, headers=bearer(key)
                )
                shown[f"over the bus {key[:9]}"] = told.data.decode() + str(dict(told.headers))
        shown |= await pages(cluster, http)
    shown |= {log.name: log.read_text(errors="replace") for log in cluster.logs()}
    shown |= seen_by_the_system(cluster)
    assert len(shown) > 40
    secrets = secrets_of(cluster)
    assert len(secrets) > 10
    found = [
        f"{what} in {where}" for what, secret in secrets.items() for where, text in shown.items() if secret in text
    ]
    assert not found
    said = [where for where, text in shown.items() if PROMPT in text and not where.startswith("over the bus")]
    assert not said, "a prompt is nobody's but its client's"


def test_files_with_secrets_are_their_owners_only(cluster: LocalCluster) -> None:
    run_dir = Path(cluster.state.run_dir)
    for folder in (run_dir, run_dir / "secrets"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in [*(run_dir / "secrets").iterdir(), cluster.state_dir / "cluster.json"]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    config = Path(f"/proc/{cluster.pid('nats-server')}/cmdline").read_bytes().decode().split("\0")[2]
    assert stat.S_IMODE(os.stat(config).st_mode) == 0o600


async def chunks_of(http: httpx.AsyncClient, key: str, began: asyncio.Event, tokens: int) -> int:
    """Chunks with text of one stream that must end well."""
    count, last = 0, ""
    request = body(max_tokens=tokens, stream=True)
    async with http.stream("POST", CHAT, json=request, headers=bearer(key)) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            if line.startswith("data: ") and "[DONE]" not in line:
                last = line
                count += 1
                began.set()
    assert '"finish_reason":"length"' in last.replace(" ", ""), last
    return count


async def test_a_client_cannot_reach_read_cancel_or_stop_anothers_requests(cluster: LocalCluster) -> None:
    """Acme streams; meanwhile somebody with a client's bus user, and with another tenant's key, tries all it can."""
    began = asyncio.Event()
    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=90) as http,
        await NatsBus.connect(cluster.state.client_bus_url, name="intruder") as intruder,
        asyncio.TaskGroup() as tasks,
    ):
        stream = tasks.create_task(chunks_of(http, ACME, began, 300))
        async with asyncio.timeout(60):
            await began.wait()
        for subject in (">", f"{subjects.ROOT}.>", "_INBOX.>", "isthmus.v1.ingress.*.*.events", subjects.API_CHAT):
            with pytest.raises(BusForbidden):
                async with intruder.subscribe(subject):
                    pass
        for worker in ("prefill-a", "decode-b"):
            for subject in (
                subjects.worker_cancel(WorkerId(worker)),
                subjects.worker_prefill(WorkerId(worker)),
                subjects.worker_assign(WorkerId(worker)),
            ):
                with pytest.raises(BusForbidden):
                    await intruder.request(subject, b"", timeout_s=30)
        for subject in (subjects.WORKER_LOST, subjects.HEARTBEAT_WORKER, subjects.api_cancel("other", "1")):
            with pytest.raises(BusForbidden):
                await intruder.request(subject, b"", timeout_s=30)
        refused = [
            await http.post(CHAT, json=body(max_tokens=1), headers={"x-request-id": "req-of-acme"}),
            await http.get("/ui/state"),
            await http.get("/ui/state", headers=bearer(OTHER)),
            await http.delete("/v1/chat/completions/req-of-acme", headers=bearer(OTHER)),
            await http.post("/v1/chat/completions/req-of-acme/cancel", headers=bearer(OTHER)),
        ]
        assert [answer.status_code for answer in refused] == [401, 401, 401, 404, 404]
        assert 2 <= await stream <= 302
    with pytest.raises(BusDisconnected):
        await NatsBus.connect(cluster.state.client_bus_url.replace("client.local", "planner"), name="x", timeout_s=1)


async def cached(http: httpx.AsyncClient, key: str, prompt: str, **more: Any) -> int:
    request = {"model": "isthmus-demo", "prompt": prompt, "max_tokens": 1, **more}
    answer = await http.post("/v1/completions", json=request, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_one_tenant_never_learns_from_the_cache_what_another_has_asked(cluster: LocalCluster) -> None:
    """A prompt that is cached answers sooner, and says so: whoever shares a cache can ask whether somebody asked it."""
    prompt = "a long and private prompt " * 20
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
        assert await cached(http, ACME, prompt) == 0
        assert await cached(http, ACME, prompt) > 0
        assert await cached(http, OTHER, prompt) == 0
        assert await cached(http, OTHER, prompt, cache_salt="acme") == 0


async def test_one_tenants_flood_is_refused_and_another_is_served(cluster: LocalCluster) -> None:
    began = asyncio.Event()
    async with httpx.AsyncClient(base_url=cluster.url, timeout=90) as http, asyncio.TaskGroup() as tasks:
        flood = [
            tasks.create_task(http.post(CHAT, json=body(max_tokens=100), headers=bearer(OTHER))) for _ in range(40)
        ]
        stream = tasks.create_task(chunks_of(http, ACME, began, 40))
        assert await stream > 1
        statuses = [(await answer).status_code for answer in flood]
    assert set(statuses) == {200, 429}
    assert statuses.count(429) > statuses.count(200)
