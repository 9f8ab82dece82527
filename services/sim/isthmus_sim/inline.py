"""The reference engine in virtual time: real arithmetic over real paged KV, in the loop's own thread."""

from __future__ import annotations

import asyncio
from pathlib import Path

from isthmus_shared.engines.config import EngineConfig, SimConfig
from isthmus_shared.engines.reference.runner import ReferenceRunner
from isthmus_shared.engines.runner_port import RunnerInfo, StepResult
from isthmus_shared.engines.sequence import Batch


class InlineReferenceRunner(ReferenceRunner):
    """Steps take the time of the `sim` engine's: a thread's would differ from run to run."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        super().__init__(config.model_copy(update={"model_path": folder}))
        self._costs = SimConfig().costs

    async def start(self) -> RunnerInfo:
        return self._load_model()

    async def execute(self, batch: Batch) -> StepResult:
        results = self._execute(batch)
        took_s = self._costs.step_s(
            prefill_tokens=batch.prefill_tokens,
            decode_sequences=batch.decode_sequences,
            resident_tokens=sum(work.end for work in batch.works if not work.prefill),
        )
        await asyncio.sleep(took_s)
        return StepResult(results, took_s)
