from __future__ import annotations

import asyncio

from isthmus_shared.engines.config import EngineConfig, EngineKind, SimConfig, SimCosts
from isthmus_shared.engines.factory import create_engine
from isthmus_shared.engines.sim import SIM_EOS_TOKEN_ID
from isthmus_shared.messages.work import FinishReason
from isthmus_testing.engines import ask, prompt_of, running

FREE = SimCosts(prefill_base_s=0, prefill_token_s=0, decode_base_s=0, decode_sequence_s=0, decode_resident_token_s=0)


def config(**sim: object) -> EngineConfig:
    return EngineConfig(kind=EngineKind.SIM, model_name="m", sim=SimConfig.model_validate({"costs": FREE} | sim))


async def test_output_is_printable_and_never_ends_by_itself_unless_asked() -> None:
    async with running(create_engine(config())) as engine:
        outcome = await engine.run(ask("r", prompt_of(9), max_tokens=500, ignore_eos=False))
        assert outcome.finish is FinishReason.LENGTH
        assert bytes(outcome.tokens).decode("ascii").isprintable()
        assert len(set(outcome.tokens)) == 95


async def test_the_output_ends_by_chance_where_the_hash_says() -> None:
    async with running(create_engine(config(eos_chance=0.05))) as engine:
        outcomes = [
            await engine.run(ask(f"r{i}", prompt_of(9, seed=i), max_tokens=500, ignore_eos=False)) for i in range(40)
        ]
        assert all(outcome.finish is FinishReason.STOP for outcome in outcomes)
        assert all(outcome.tokens.index(SIM_EOS_TOKEN_ID) == len(outcome.tokens) - 1 for outcome in outcomes)
        assert 10 < sum(len(outcome.tokens) for outcome in outcomes) / 40 < 40  # 20 on average
        ignoring = await engine.run(ask("r", prompt_of(9), max_tokens=500))
        assert len(ignoring.tokens) == 500


async def test_another_model_name_is_another_model() -> None:
    other = config().model_copy(update={"model_name": "n"})
    async with running(create_engine(config())) as a, running(create_engine(other)) as b:
        assert a.info.model_fingerprint != b.info.model_fingerprint
        transfer = a.transfer(20)
        first = await a.run(ask("r", prompt_of(20), save=transfer))
        b.submit(ask("r", prompt_of(20), load=transfer))
        b.engine.start_decode(ask("r", (1,)).request_id, first.tokens[0])
        assert (await b.until("r")).finish is FinishReason.ERROR


async def test_a_step_takes_the_time_that_it_costs() -> None:
    costs = SimCosts(
        prefill_base_s=0.01, prefill_token_s=0.001, decode_base_s=0.02, decode_sequence_s=0, decode_resident_token_s=0
    )
    async with running(create_engine(config(costs=costs))) as engine:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await engine.run(ask("r", prompt_of(20), max_tokens=3))
        assert loop.time() - began_s >= 0.01 + 0.02 + 2 * 0.02 - 0.005
        assert [report.prefill_tokens for report in engine.reports] == [20, 0, 0]
        assert [report.decode_sequences for report in engine.reports] == [0, 1, 1]
