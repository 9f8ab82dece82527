"""vLLM engines in processes of their own, for tests: one process imports vLLM once and forks an engine for each asked.

`python -m isthmus_testing.vllm_engines` is that process; `EngineHost` starts it, `Engine` speaks with one engine.
Messages are JSON lines. An engine steps by itself; a request's answer comes when it has finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_S = 300.0
ANSWER_S = 300.0
MAX_LINE_BYTES = 64 << 20
MIB = 1 << 20
TOKENS = 24
"""Of output, where a test compares two engines."""
LOGPROB_TOLERANCE = 1e-3
"""Nats. Engines add up in another order when their batches differ; a wrong key changes them by far more."""
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}
CONNECTOR = {
    "kv_connector": "IsthmusConnector",
    "kv_connector_module_path": "isthmus_kvrelay.client.vllm_connector",
}


def vllm_missing() -> str | None:
    """Why tests that need vLLM are skipped here; None if they are not."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed here: `make test-vllm` installs it and runs these tests"
    return None


# --- the test's side


@dataclass(frozen=True)
class Answer:
    """One request's end."""

    token_ids: list[int]
    logprobs: list[float]
    finish: str | None
    kv_transfer_params: dict[str, Any] | None
    cached_tokens: int
    times_s: list[float]
    """When each token came, on the engine's monotonic clock."""


class Engine:
    """One engine. Close its writer and it ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._count = 0
        self._listening = asyncio.create_task(self._listen())

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, params: Mapping[str, Any] | None = None, *, key: str | None = None
    ) -> Answer:
        """Greedy, with the chosen tokens' logprobs. With a `key` it can be aborted."""
        found = await self._ask("generate", key, prompt=list(prompt), max_tokens=max_tokens, params=params)
        return Answer(**found)

    async def abort(self, key: str) -> None:
        await self._ask("abort", None, target=key)

    async def state(self) -> dict[str, Any]:
        """Free blocks, requests that the scheduler knows, and what the connector's worker has carried."""
        found: dict[str, Any] = await self._ask("state", None)
        return found

    async def _ask(self, command: str, key: str | None, **fields: Any) -> Any:
        self._count += 1
        key = key or f"q{self._count}"
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        self._writer.write(json.dumps({"command": command, "key": key, **fields}).encode() + b"\n")
        async with asyncio.timeout(ANSWER_S):
            return await future

    async def _listen(self) -> None:
        while line := await self._reader.readline():
            message = json.loads(line)
            future = self._waiting.pop(message["key"], None)
            if future is not None and not future.done():
                if "error" in message:
                    future.set_exception(RuntimeError(message["error"]))
                else:
                    future.set_result(message["answer"])
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RuntimeError("the engine's process has ended"))

    async def close(self) -> None:
        self._writer.close()
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)


@dataclass
class EngineHost:
    """The process that imports vLLM and forks."""

    process: asyncio.subprocess.Process
    server: asyncio.Server
    path: Path
    arrived: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    engines: list[Engine] = field(default_factory=list)

    async def engine(self, *, core: int = 0, environ: Mapping[str, str] | None = None, **arguments: Any) -> Engine:
        """Fork an engine with those arguments of vLLM's `EngineArgs`."""
        assert self.process.stdin is not None
        order = {"socket": str(self.path), "arguments": arguments, "core": core, "environ": dict(environ or {})}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(START_S):
            reader, writer = await self.arrived.get()
            line = await reader.readline()
        if line != b'"up"\n':
            raise RuntimeError(f"the engine did not start: {line.decode() or 'its process has ended'}")
        engine = Engine(reader, writer)
        self.engines.append(engine)
        return engine


@contextlib.asynccontextmanager
async def engine_host(folder: Path) -> AsyncIterator[EngineHost]:
    arrived: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    path = folder / "engines.sock"

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.put_nowait((reader, writer))

    server = await asyncio.start_unix_server(accept, path, limit=MAX_LINE_BYTES)
    environ = {**os.environ, **ENVIRON, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, env=environ
    )
    host = EngineHost(process, server, path, arrived)
    try:
        yield host
    finally:
        for engine in host.engines:
            await engine.close()
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(START_S):
            await process.wait()
        server.close()


def connected(role: str, relay_socket: Path, *, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """`kv_transfer_config` for an engine at that relay."""
    return {
        **CONNECTOR,
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"relay_socket": str(relay_socket), **extra},
    }


def arguments(model: Path, **more: Any) -> dict[str, Any]:
    """An engine for tests: small, float32, prefills in chunks of 256."""
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "seed": 0,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 48 * MIB,
        "disable_log_stats": True,
        **more,
    }


def prompt_of(tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed * 7919 + tokens)
    return [draw.randrange(10, 250) for _ in range(tokens)]


async def crossing(prefill: Engine, decode: Engine, prompt: Sequence[int], **params: Any) -> Answer:
    """The prompt prefilled in one and decoded in the other."""
    first = await prefill.generate(prompt, 1, {"do_remote_decode": True, **params})
    assert first.kv_transfer_params is not None
    return await decode.generate(prompt, TOKENS, first.kv_transfer_params)


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.token_ids == expected.token_ids
    worst = max(abs(one - other) for one, other in zip(found.logprobs, expected.logprobs, strict=True))
    assert worst <= LOGPROB_TOLERANCE


async def at_rest(engine: Engine) -> dict[str, Any]:
    """The engine's state once its scheduler knows of no request."""
    async with asyncio.timeout(ANSWER_S):
        while (state := await engine.state())["requests"]:
            pass
    return state


# --- the forking process


def main() -> None:
    import vllm.entrypoints.llm
    import vllm.v1.engine.llm_engine  # noqa: F401

    children = []
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(0)
            _run_engine(json.loads(line))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _run_engine(order: dict[str, Any]) -> None:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(order["core"])
    os.environ.update(order["environ"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(order["socket"])
        try:
            engine = _Engine(sock, order["arguments"])
        except (ValueError, RuntimeError, ImportError, AssertionError, OSError) as error:
            sock.sendall(json.dumps(f"{type(error).__name__}: {error}").encode() + b"\n")
            return
        sock.sendall(b'"up"\n')
        engine.run()


class _Engine:
    def __init__(self, sock: socket.socket, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._sock = sock
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._core: Any = self._engine.engine_core.engine_core
        self._buffer = b""
        self._keys: dict[str, list[float]] = {}
        """key → when its tokens came."""
        self._preemptions = 0
        preempt = self._core.scheduler._preempt_request

        def counted(*arguments: Any, **more: Any) -> None:
            self._preemptions += 1
            preempt(*arguments, **more)

        self._core.scheduler._preempt_request = counted

    def run(self) -> None:
        while True:
            busy = self._core.scheduler.has_requests()
            if not self._read(wait=not busy):
                return
            if busy:
                for output in self._engine.step():
                    self._take(output)

    def _read(self, *, wait: bool) -> bool:
        """Handles what has come; False at the end."""
        self._sock.setblocking(wait)
        try:
            data = self._sock.recv(1 << 20)
        except BlockingIOError:
            return True
        finally:
            self._sock.setblocking(True)
        if not data:
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        return True

    def _handle(self, message: dict[str, Any]) -> None:
        match message["command"]:
            case "generate":
                self._generate(message)
            case "abort":
                self._engine.abort_request([message["target"]])
                self._say(message["key"], answer=None)
                if self._keys.pop(message["target"], None) is not None:
                    self._say(message["target"], error="aborted")
            case "state":
                self._say(message["key"], answer=self._state())

    def _generate(self, message: dict[str, Any]) -> None:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": message["params"]} if message["params"] else None
        sampling = SamplingParams(
            temperature=0.0, max_tokens=message["max_tokens"], ignore_eos=True, logprobs=0, extra_args=extra
        )
        self._keys[message["key"]] = []
        self._engine.add_request(message["key"], {"prompt_token_ids": message["prompt"]}, sampling)

    def _take(self, output: Any) -> None:
        times = self._keys.get(output.request_id)
        if times is None:
            return
        done = output.outputs[0]
        times.append(time.monotonic())
        if output.finished:
            del self._keys[output.request_id]
            logprobs = [step[token].logprob for step, token in zip(done.logprobs, done.token_ids, strict=True)]
            self._say(
                output.request_id,
                answer={
                    "token_ids": list(done.token_ids),
                    "logprobs": logprobs,
                    "finish": done.finish_reason,
                    "kv_transfer_params": output.kv_transfer_params,
                    "cached_tokens": output.num_cached_tokens or 0,
                    "times_s": times,
                },
            )

    def _state(self) -> dict[str, Any]:
        scheduler = self._core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        found: dict[str, Any] = {
            "free_blocks": pool.get_num_free_blocks(),
            "requests": len(scheduler.requests),
            "preemptions": self._preemptions,
        }
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if has_kv_transfer_group():  # else the ranks are processes of their own
            halves = {"worker": get_kv_transfer_group().stats, "scheduler": scheduler.connector.stats}
            found["totals"] = dict(halves["worker"].totals)
            found["hook_us"] = {name: list(stats.recent_hook_us) for name, stats in halves.items()}
        return found

    def _say(self, key: str, **fields: Any) -> None:
        self._sock.sendall(json.dumps({"key": key, **fields}).encode() + b"\n")


if __name__ == "__main__":
    main()
