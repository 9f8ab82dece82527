"""Runs an engine in a test: collects its reports by request and lets a test wait for what it needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from isthmus_shared.engines.kv_memory import MemoryKvTransfer
from isthmus_shared.engines.port import Engine, EngineInfo, EngineRequest, SequenceOutput, StepReport
from isthmus_shared.errors import Fault
from isthmus_shared.ids import RequestId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.kv.negotiate import require_exchangeable
from isthmus_shared.messages.work import FinishReason, SamplingParams, TokenLogprob

WAIT_S = 60.0

Make = Callable[..., AbstractAsyncContextManager["Harness"]]
"""make(form, **config): starts an engine of that form."""


@dataclass
class Outcome:
    """Everything that one request has given so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    finishes: list[FinishReason] = field(default_factory=list)
    fault: Fault | None = None
    cached: int = 0
    computed: int = 0
    """Prompt tokens that were prefilled for it, where the engine tells."""

    @property
    def finish(self) -> FinishReason:
        assert len(self.finishes) == 1, f"one terminal output, not {self.finishes}"
        return self.finishes[0]

    def add(self, output: SequenceOutput) -> None:
        assert not self.finishes, "an output after the terminal one"
        assert (output.fault is not None) == (output.finish is FinishReason.ERROR)
        if output.token_ids:
            self.indexes.append(output.output_index)
        self.tokens += output.token_ids
        self.cached = max(self.cached, output.cached_tokens)
        self.computed += sum(tokens for tokens, _ in output.prefill.chunks) if output.prefill is not None else 0
        self.logprobs += output.logprobs or ()
        if output.finish is not None:
            self.finishes.append(output.finish)
            self.fault = output.fault


class CheckedEngine(Engine, Protocol):
    """What all engines here have beyond the port."""

    @property
    def preemptions(self) -> int: ...

    def check_invariants(self) -> None: ...


class Harness:
    def __init__(self, engine: CheckedEngine, info: EngineInfo) -> None:
        self.engine, self.info = engine, info
        self.outcomes: dict[str, Outcome] = {}
        self.reports: list[StepReport] = []
        self._changed = asyncio.Condition()

    async def collect(self) -> None:
        async for report in self.engine.steps():
            async with self._changed:
                self.reports.append(report)
                for output in report.outputs:
                    self.outcomes.setdefault(output.request_id, Outcome()).add(output)
                self._changed.notify_all()

    def submit(self, request: EngineRequest) -> str:
        self.engine.submit(request)
        return request.request_id

    async def until(self, request_id: str, *, tokens: int | None = None) -> Outcome:
        """Until it has ended, or has given that many tokens."""

        def there() -> bool:
            outcome = self.outcomes.get(request_id, Outcome())
            return bool(outcome.finishes) or (tokens is not None and len(outcome.tokens) >= tokens)

        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(there)
        return self.outcomes[request_id]

    async def run(self, request: EngineRequest) -> Outcome:
        return await self.until(self.submit(request))

    def assert_empty(self) -> None:
        self.engine.check_invariants()
        load = self.engine.load()
        assert (load.running, load.waiting, load.loading) == (0, 0, 0)
        assert load.kv_blocks_free == self.info.kv_blocks_total
        assert load.queued_prefill_tokens == 0

    def transfer(self, prompt_tokens: int, *, slot_bytes: int = 1000) -> MemoryKvTransfer:
        return MemoryKvTransfer(self.engine.manifest(prompt_tokens).total_bytes, slot_bytes=slot_bytes)


@asynccontextmanager
async def running(engine: CheckedEngine) -> AsyncIterator[Harness]:
    harness = Harness(engine, await engine.start())
    async with asyncio.TaskGroup() as group:
        group.create_task(harness.collect())
        try:
            yield harness
        finally:
            await engine.stop()


def prompt_of(tokens: int, *, seed: int = 0) -> tuple[int, ...]:
    """Bytes that differ everywhere, so that KV in a wrong place changes the output."""
    return tuple((seed * 53 + i * 31 + i * i * 7) % 256 for i in range(tokens))


def ask(
    request_id: str,
    prompt: Sequence[int],
    *,
    output_offset: int = 0,
    save: MemoryKvTransfer | None = None,
    load: MemoryKvTransfer | None = None,
    manifest: KvManifest | None = None,
    salt: str = "",
    **sampling: object,
) -> EngineRequest:
    params = {"max_tokens": 8, "temperature": 0.0, "logprobs": 3, "ignore_eos": True} | sampling
    return EngineRequest(
        request_id=RequestId(request_id),
        token_ids=tuple(prompt),
        sampling=SamplingParams.model_validate(params),
        output_offset=output_offset,
        kv_save=None if save is None else save.sink,
        kv_load=None if load is None else load.source,
        kv_manifest=manifest,
        cache_salt=salt,
    )


async def hand_over(producer: Harness, consumer: Harness, name: str, prompt: Sequence[int], **kw: object) -> Outcome:
    """Prefill on one engine, decode on the other; the output of both together, as the client sees it."""
    transfer, manifest = producer.transfer(len(prompt)), producer.engine.manifest(len(prompt))
    require_exchangeable(consumer.engine.manifest(len(prompt)), manifest)
    consumer.submit(ask(name, prompt, load=transfer, manifest=manifest, **kw))
    first = await producer.run(ask(name, prompt, save=transfer, **kw))
    if first.finish is not FinishReason.HANDOFF:
        consumer.engine.abort(RequestId(name))
        await consumer.until(name)
        return first
    consumer.engine.start_decode(RequestId(name), first.tokens[0])
    rest = await consumer.until(name)
    return Outcome(
        tokens=first.tokens + rest.tokens,
        logprobs=first.logprobs + rest.logprobs,
        indexes=first.indexes + rest.indexes,
        finishes=rest.finishes,
        fault=rest.fault,
        cached=first.cached,
    )


def assert_same_output(got: Outcome, wanted: Outcome, *, tolerance: float = 1e-5) -> None:
    """Token for token; logprobs within `tolerance`, in which two of the likeliest may also have changed places."""
    assert got.tokens == wanted.tokens
    assert got.indexes == wanted.indexes
    assert got.finish is wanted.finish
    assert len(got.logprobs) == len(wanted.logprobs)
    for ours, theirs in zip(got.logprobs, wanted.logprobs, strict=True):
        assert abs(ours.logprob - theirs.logprob) <= tolerance
        assert len(ours.top) == len(theirs.top)
        for (token, logprob), (other, other_logprob) in zip(ours.top, theirs.top, strict=True):
            assert abs(logprob - other_logprob) <= tolerance
            assert token == other or _near(ours, logprob, tolerance) > 1


def _near(entry: TokenLogprob, logprob: float, tolerance: float) -> int:
    return sum(abs(logprob - other) <= 2 * tolerance for _, other in entry.top)
