"""Prefill in any vendor's layout, decode in any other's: the tokens are those of one engine alone."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from isthmus_shared.errors import ManifestMismatch
from isthmus_shared.kv.profiles import PROFILES
from isthmus_testing.engines import Make, ask, assert_same_output, hand_over, prompt_of

FP8 = ("nvidia-flash:fp8_e4m3fn", "amd-shuffle:fp8_e4m3fnuz", "gaudi-128:fp8_e4m3fn")
PROMPTS = (17, 150)
"""Over an edge of the small blocks, and over one of the large; with a window's start in the middle of a block."""


@pytest.mark.parametrize("kinds", [tuple(PROFILES), FP8], ids=["bf16", "fp8"])
async def test_tokens_survive_the_crossing_between_any_two_vendors(make: Make, kinds: tuple[str, ...]) -> None:
    async with AsyncExitStack() as stack:
        engines = {name: await stack.enter_async_context(make(name)) for name in kinds}
        assert len({engine.info.kv_layout for engine in engines.values()}) == len(kinds)
        for tokens in PROMPTS:
            prompt = prompt_of(tokens, seed=tokens)
            alone = [await engine.run(ask(f"alone-{tokens}", prompt)) for engine in engines.values()]
            for one in alone[1:]:
                assert_same_output(one, alone[0])
            for producer, a in engines.items():
                for consumer, b in engines.items():
                    if a is not b:
                        got = await hand_over(a, b, f"{producer}-{consumer}-{tokens}", prompt)
                        assert_same_output(got, alone[0])
        for engine in engines.values():
            engine.assert_empty()


async def test_vendors_of_different_dtypes_are_refused(make: Make) -> None:
    async with make("cpu:fp32") as a, make("amd-shuffle") as b:
        with pytest.raises(ManifestMismatch, match="dtype"):
            await hand_over(a, b, "r", prompt_of(20))
