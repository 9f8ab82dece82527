"""What computes in a simulation, and what reads its tokens."""

from __future__ import annotations

import asyncio
import dataclasses

import tokenizers
from tokenizers import decoders, models

from isthmus_ingress.text import Tokenizer, byte_level_alphabet
from isthmus_shared.engines.runner_port import RunnerInfo, StepResult
from isthmus_shared.engines.sequence import Batch
from isthmus_shared.engines.sim import SimRunner


class SlowableRunner:
    """A sim runner whose steps take `slowness` times as long."""

    def __init__(self, inner: SimRunner) -> None:
        self.slowness = 1.0
        self._inner = inner

    async def start(self) -> RunnerInfo:
        return await self._inner.start()

    async def stop(self) -> None:
        await self._inner.stop()

    async def execute(self, batch: Batch) -> StepResult:
        step = await self._inner.execute(batch)
        took_s = step.took_s * self.slowness  # it may change while we sleep
        await asyncio.sleep(took_s - step.took_s)
        return dataclasses.replace(step, took_s=took_s)


def byte_tokenizer() -> Tokenizer:
    """One token per byte; what the sim engine gives is printable."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner, source="simulation")
