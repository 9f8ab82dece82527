"""No panel of the dashboards is empty: every query of theirs, put to a Prometheus that watches the containers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from isthmus_cli.ports import claim_port
from isthmus_testing.compose_cluster import BUS_NET, COMPOSE, ComposeCluster, why_not
from isthmus_testing.engines import prompt_of
from isthmus_testing.openai_client import Case, client, complete

BINARY = shutil.which("prometheus")
pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(BINARY is None, reason="needs the program `prometheus` (Debian: apt install prometheus)"),
    pytest.mark.timeout(600),
]
WATCH_S = 90.0
"""Longest until every query has an answer: two scrapes, for rates."""


@asynccontextmanager
async def prometheus(cluster: ComposeCluster, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The project's own configuration, with the containers' names replaced by their addresses."""
    config = yaml.safe_load((COMPOSE / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    (targets,) = job["static_configs"]
    names = [target.partition(":")[0] for target in targets["targets"]]
    assert set(names) == set(cluster.services()) - {"nats"}, "every service is watched"
    network = f"{cluster.project}_{BUS_NET}"
    targets["targets"] = [
        f"{cluster.inspect(name)['NetworkSettings']['Networks'][network]['IPAddress']}:9100" for name in names
    ]
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = claim_port("127.0.0.1", 0)
    assert BINARY is not None
    command = [BINARY, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, f"--web.listen-address=127.0.0.1:{port}", stdout=log, stderr=log
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            yield http
    finally:
        process.kill()
        await process.wait()


async def test_no_panel_is_empty(cluster: ComposeCluster, tmp_path: Path) -> None:
    queries = {
        (path.stem, panel["title"], target["expr"].replace("$__rate_interval", "10s"))
        for path in (COMPOSE / "grafana" / "dashboards").glob("*.json")
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]
        for target in panel["targets"]
    }
    assert len(queries) > 30
    async with prometheus(cluster, tmp_path) as http, client(cluster.url) as openai:
        empty = set(queries)
        try:
            async with asyncio.timeout(WATCH_S):
                while empty:
                    case = Case(prompt_of(100), max_tokens=20)
                    assert (await complete(openai, case)).error is None
                    empty = {query for query in empty if not await answered(http, query[2])}
        except TimeoutError:
            pass
    assert empty == set(), (tmp_path / "log").read_text()[-1000:]


async def answered(http: httpx.AsyncClient, expression: str) -> bool:
    """Whether there is a number in the answer. Raises if the query itself is wrong."""
    try:
        response = await http.get("/api/v1/query", params={"query": expression})
    except httpx.TransportError:
        return False  # it is still starting
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return False
    fields = response.json()
    assert fields["status"] == "success", f"{expression}: {fields}"
    return any(float(sample["value"][1]) == float(sample["value"][1]) for sample in fields["data"]["result"])
