"""A whole cluster whose only prefill worker stops: another one takes its role, and the streams that it has run on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from isthmus_shared.messages.health import ClusterView, Role
from isthmus_testing.engines import prompt_of
from isthmus_testing.local_cluster import local_cluster
from isthmus_testing.openai_client import Case, client, complete, stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CHANGED_S = 60.0
CLUSTER = """\
engine: sim
env: {ISTHMUS_ENGINE_SIM_DECODE_BASE_S: "0.05"}
nodes:
  - id: node-a
    workers:
      - {id: prefill-a, role: prefill}
  - id: node-b
    workers:
      - {id: decode-b, role: decode, env: {ISTHMUS_WORKER_ROLES_ABLE: "prefill,decode"}}
  - id: node-c
    workers:
      - {id: decode-c, role: decode, kv_layout: "hnd:64:fp32", env: {ISTHMUS_WORKER_ROLES_ABLE: "prefill,decode"}}
"""
CASES = [Case(prompt_of(40 + 37 * number, seed=number), max_tokens=300) for number in range(6)]
"""Fifteen seconds each, at least: longer than it takes to find that a worker is gone, and to replace it."""


def prefilling(view: ClusterView) -> list[str]:
    return [beat.worker_id for beat in view.workers if Role.PREFILL in beat.roles]


async def test_streams_run_on_while_their_worker_takes_another_role(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    begun, ended = [asyncio.Event() for _ in CASES], [0]
    with local_cluster([str(file), "--model", str(tiny_model)], tmp_path / "state") as cluster:
        async with client(cluster.url) as http, asyncio.TaskGroup() as tasks:

            async def one(number: int) -> list[int]:
                async def heard() -> None:
                    begun[number].set()

                answer = await stream(http, CASES[number], heard)
                ended[0] += 1
                assert (answer.error, answer.finish) == (None, "length")
                return answer.token_ids

            running = [tasks.create_task(one(number)) for number in range(len(CASES))]
            for event in begun:
                await event.wait()
            pid = cluster.pid("prefill-a")
            os.kill(pid, signal.SIGSTOP)
            try:
                async with asyncio.timeout(CHANGED_S):
                    while not (found := [name for name in prefilling(await cluster.view()) if name != "prefill-a"]):
                        pass
                assert found[0] in ("decode-b", "decode-c")
                assert ended[0] < len(CASES), "all streams had ended before anything changed"
                crossed = await complete(http, Case(prompt_of(99, seed=99), max_tokens=8))
                assert (crossed.error, crossed.finish) == (None, "length")
            finally:
                os.kill(pid, signal.SIGCONT)
            given = [await task for task in running]
            again = await asyncio.gather(*(complete(http, case) for case in CASES))
        assert given == [answer.token_ids for answer in again]
        (changed,) = found
        assert (await cluster.metrics(changed))["isthmus_worker_finishes_total{phase=prefill}{reason=handoff}"] >= 1
