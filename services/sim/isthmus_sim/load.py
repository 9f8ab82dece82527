"""Simulated clients: what they ask for, when they leave, and what they must get."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from isthmus_ingress.frontend import Frontend
from isthmus_ingress.prepare import Prepared, Prompt
from isthmus_ingress.roster import Model
from isthmus_shared.engines.batching import BatchingEngine
from isthmus_shared.engines.config import EngineConfig, EngineKind, SimConfig
from isthmus_shared.engines.port import EngineRequest
from isthmus_shared.engines.sim import SimRunner
from isthmus_shared.errors import Cancelled, IsthmusError
from isthmus_shared.ids import RequestId
from isthmus_shared.messages.work import FinishReason, SamplingParams
from isthmus_sim.process import EOS_CHANCE, MODEL, REQUEST_TIMEOUT_S

MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 600, 60
GRACE_S = 0.05
LEAVE_S = 0.2
"""A client that has left is done with within this."""
NEVER = frozenset(
    {"internal_error", "protocol_violation", "invalid_request", "manifest_mismatch", "config_invalid", "cancelled"}
)
"""Codes that no fault of the world explains."""


@dataclass(frozen=True)
class Ask:
    name: str
    at_s: float
    prompt: tuple[int, ...]
    sampling: SamplingParams
    leaves_after_s: float | None


@dataclass
class Outcome:
    """What one client saw."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: IsthmusError | None = None
    began_s: float = 0.0
    left_s: float | None = None
    ended_s: float | None = None
    crashed: bool = False
    """Its ingress died: it saw its connection close."""

    @property
    def request_text(self) -> str:
        wanted = self.ask.sampling.max_tokens
        return f"{self.ask.name} ({len(self.ask.prompt)} + {wanted} tokens, got {len(self.tokens)})"


def draw(rng: random.Random, count: int, *, over_s: float) -> list[Ask]:
    """Mixed lengths, short ones and the edges of blocks and chunks more often than chance would have them."""
    asks = []
    for number in range(count):
        lengths = (1, 15, 16, 17, 63, 64, 65, 256, 257, MAX_PROMPT_TOKENS, rng.randint(1, MAX_PROMPT_TOKENS))
        length = rng.choice(lengths)
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 2, rng.randint(1, MAX_OUTPUT_TOKENS), rng.randint(20, MAX_OUTPUT_TOKENS))),
            temperature=rng.choice((0.0, 0.8)),
            seed=number,
            ignore_eos=rng.random() < 0.5,
        )
        leaves = rng.choice((None, None, None, None, None, None, rng.expovariate(4.0), rng.uniform(0, 0.06)))
        prompt = tuple(rng.randrange(256) for _ in range(length))
        asks.append(Ask(f"client-{number}", rng.uniform(0, over_s), prompt, sampling, leaves))
    return sorted(asks, key=lambda ask: ask.at_s)


async def answers_of_one_engine(asks: list[Ask]) -> dict[str, tuple[list[int], str]]:
    """What a single aggregated engine gives for each: its tokens and how it ended."""
    config = EngineConfig(
        kind=EngineKind.SIM, model_name=MODEL, kv_blocks=4096, max_waiting=4096, sim=SimConfig(eos_chance=EOS_CHANCE)
    )
    engine = BatchingEngine(SimRunner(config), config)
    await engine.start()
    found: dict[str, tuple[list[int], str]] = {ask.name: ([], "") for ask in asks}
    for ask in asks:
        engine.submit(EngineRequest(RequestId(ask.name), ask.prompt, ask.sampling))
    left = len(asks)
    async for report in engine.steps():
        for output in report.outputs:
            tokens, _ = found[output.request_id]
            tokens += output.token_ids
            if output.finish is not None:
                found[output.request_id] = tokens, "stop" if output.finish is FinishReason.STOP else "length"
                left -= 1
        if left == 0:
            break
    await engine.stop()
    return found


async def serve(frontend: Frontend, outcome: Outcome, *, traceparent: str | None = None) -> None:
    """One client's request through the layer that both front doors use, to its end."""
    loop = asyncio.get_running_loop()
    ask = outcome.ask
    outcome.began_s = loop.time()
    prepared = Prepared(
        chat=False,
        model=Model(MODEL, 32768),
        prompts=(Prompt(ask.prompt, ""),),
        sampling=(ask.sampling,),
        choices_per_prompt=1,
        stops=(),
        stream=True,
        include_usage=False,
        continuous_usage=False,
        return_token_ids=False,
        top_logprobs=None,
    )
    leaving: asyncio.TimerHandle | None = None
    try:
        with frontend.exchange(prepared, received_s=outcome.began_s, traceparent=traceparent) as exchange:

            def leave() -> None:
                outcome.left_s = loop.time()
                exchange.outbox.close()

            if ask.leaves_after_s is not None:
                leaving = loop.call_later(ask.leaves_after_s, leave)
            while not exchange.finished:
                for _, update in await exchange.updates():
                    if hasattr(update, "token_ids"):
                        outcome.tokens += update.token_ids
                    else:
                        outcome.finish = update.reason
    except Cancelled as error:
        outcome.error = error
    except IsthmusError as error:
        outcome.error = error
    finally:
        outcome.ended_s = loop.time()
        if leaving is not None:
            leaving.cancel()


def verdict(outcome: Outcome, wanted: tuple[list[int], str], *, faults: bool) -> str | None:
    """What is wrong with how it ended; None if nothing is."""
    tokens, finish = wanted
    who, code = outcome.request_text, outcome.error.code if outcome.error else None
    if outcome.tokens != tokens[: len(outcome.tokens)]:
        return f"{who} got other tokens: {outcome.tokens} where {tokens} was right"
    if outcome.crashed:
        return None
    if outcome.ended_s is None:
        return f"{who} never ended"
    if outcome.left_s is not None:
        if outcome.ended_s - outcome.left_s > LEAVE_S:
            return f"{who} left at {outcome.left_s:.3f} s and ended only at {outcome.ended_s:.3f} s"
        return None if code == "cancelled" else f"{who} left, and ended with {code}"
    if outcome.ended_s - outcome.began_s > REQUEST_TIMEOUT_S + GRACE_S:
        return f"{who} ended {outcome.ended_s - outcome.began_s:.3f} s after it began"
    if outcome.error is None:
        if (outcome.tokens, outcome.finish) != (tokens, finish):
            return f"{who} ended with {outcome.finish} after {outcome.tokens}; right: {finish} after {tokens}"
        return None
    if code in NEVER or not faults:
        return f"{who} ended with {code}: {outcome.error.text}"
    return None
