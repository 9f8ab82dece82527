"""People who keep their own stack: two of vLLM's own API servers, two relays, and the example's proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus_testing.relay import daemon_settings, running
from isthmus_testing.tiny_checkpoints import Family, write_tiny_checkpoint
from isthmus_testing.vllm_engines import ENVIRON, MIB, connected, prompt_of, vllm_missing
from isthmus_testing.waiting import eventually

pytestmark = [
    pytest.mark.skipif(vllm_missing() is not None, reason=str(vllm_missing())),
    pytest.mark.timeout(1200),
]

START_S = 800.0
"""Two interpreters that import vLLM at once, on a machine that has other things to do."""
STOP_S = 30.0
PROXY = Path(__file__).resolve().parents[2] / "examples" / "vllm_proxy.py"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextlib.asynccontextmanager
async def process(*command: str, core: int = 0) -> AsyncIterator[None]:
    environ = {
        **os.environ,
        **ENVIRON,
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    del environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
    child = await asyncio.create_subprocess_exec(sys.executable, *command, env=environ, start_new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await child.wait()
        except TimeoutError:  # one that is still starting hears nothing
            os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


async def up(client: httpx.AsyncClient, path: str) -> None:
    answered: list[int] = []

    async def ask() -> None:
        async with asyncio.timeout(START_S):
            while not answered:
                with contextlib.suppress(httpx.TransportError):
                    answered.append((await client.get(path)).status_code)

    asking = asyncio.create_task(ask())
    await eventually(lambda: bool(answered), START_S)
    await asking


def server(model: Path, port: int, role: str, relay: Path) -> list[str]:
    return [
        *("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model), "--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "1024"),
        *("--enforce-eager", "--kv-cache-memory-bytes", str(48 * MIB), "--no-enable-prefix-caching"),
        *("--kv-transfer-config", json.dumps(connected(role, relay))),
    ]


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 16, "temperature": 0, "logprobs": 1, "ignore_eos": True, **fields}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_examples_proxy_joins_two_api_servers(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "llama", Family.LLAMA)
    ports = [free_port() for _ in range(3)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    near_settings, far_settings = (
        daemon_settings(tmp_path, name, total_slots=64, slot_bytes=MIB) for name in ("a", "b")
    )
    async with (
        running(near_settings) as near,
        running(far_settings) as far,
        process(*server(model, ports[0], "kv_producer", near.daemon.settings.socket)),
        process(*server(model, ports[1], "kv_consumer", far.daemon.settings.socket), core=1),
        process(str(PROXY), "--prefill", urls[0], "--decode", urls[1], "--port", str(ports[2])),
        httpx.AsyncClient(base_url=urls[0], timeout=START_S) as prefill,
        httpx.AsyncClient(base_url=urls[1], timeout=START_S) as decode,
        httpx.AsyncClient(base_url=urls[2], timeout=START_S) as proxy,
    ):
        await up(prefill, "/health")
        await up(decode, "/health")
        await up(proxy, "/v1/models")
        for tokens in (1, 40, 300):
            prompt = prompt_of(tokens, 1)
            # Asked directly, the decode engine computes the prompt itself.
            alone, joined = await complete(decode, prompt=prompt), await complete(proxy, prompt=prompt)
            assert joined["choices"][0]["text"] == alone["choices"][0]["text"]
            logprobs = [one["choices"][0]["logprobs"]["token_logprobs"] for one in (joined, alone)]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
        assert far.daemon.stats().delivered_in == 3
        await streams(proxy)
        assert re.search(r"isthmus_kv_loaded_total\{.*\} 4\.0", (await decode.get("/metrics")).text)
        bad = await proxy.post("/v1/completions", content=b"{")
        assert (bad.status_code, "not JSON" in bad.text) == (400, True)


async def streams(proxy: httpx.AsyncClient) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with proxy.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] <= 8
