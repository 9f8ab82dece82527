"""The services in virtual time with an engine that computes: tokens survive crossings between layouts, and faults."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from isthmus_shared.engines.config import EngineConfig
from isthmus_shared.engines.reference.checkpoint import ensure_tiny_checkpoint
from isthmus_sim.inline import InlineReferenceRunner
from isthmus_sim.load import Ask, prompt_of
from isthmus_sim.plan import Plan, draw_plan
from isthmus_sim.simulation import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def small(plan: Plan) -> Plan:
    """Few requests and short ones: every token costs arithmetic."""

    def shorter(ask: Ask) -> Ask:
        sampling = ask.sampling.model_copy(update={"max_tokens": min(12, ask.sampling.max_tokens)})
        prompt = prompt_of(plan.seed, ask.sampling.seed, min(80, len(ask.prompt)))
        return dataclasses.replace(ask, sampling=sampling, prompt=prompt)

    return dataclasses.replace(plan, asks=tuple(map(shorter, plan.asks[:8])), late=tuple(map(shorter, plan.late[:2])))


@pytest.mark.parametrize("seed", [7, 23])
def test_every_client_gets_the_tokens_of_one_reference_engine(seed: int, folder: Path) -> None:
    def make(config: EngineConfig) -> InlineReferenceRunner:
        return InlineReferenceRunner(config, folder)

    result = run(small(draw_plan(seed)), make_runner=make)
    assert not result.problems, result.report
    assert all(outcome.tokens for outcome in result.outcomes), "those that ask after all has healed are served"
