"""Simulated clients: what they ask for, when they leave, and what they must get."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from isthmus_ingress.driver import RunningSaga
from isthmus_ingress.frontend import Frontend
from isthmus_ingress.saga_types import Event
from isthmus_shared.engines.batching import BatchingEngine
from isthmus_shared.engines.config import EngineConfig, EngineKind, SimConfig
from isthmus_shared.engines.port import EngineRequest
from isthmus_shared.engines.sim import SimRunner
from isthmus_shared.errors import IsthmusError
from isthmus_shared.ids import RequestId, new_id
from isthmus_shared.messages.work import FinishReason, SamplingParams
from isthmus_sim.loop import world_loop
from isthmus_sim.services import EOS_CHANCE, MODEL, REQUEST_TIMEOUT_S, MakeRunner

MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 600, 60
SHARED_CHANCE = 0.4
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
    leaves_after_events: int | None = None
    """Of its saga: a point in the life of the request rather than in time."""


@dataclass
class Outcome:
    """What one client saw."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: IsthmusError | None = None
    began_s: float = 0.0
    first_s: float | None = None
    """Its first token."""
    left_s: float | None = None
    ended_s: float | None = None
    crashed: bool = False
    """Its ingress died: it saw its connection close."""

    @property
    def took_s(self) -> float:
        return 0.0 if self.ended_s is None else self.ended_s - self.began_s

    @property
    def request_text(self) -> str:
        wanted = self.ask.sampling.max_tokens
        return f"{self.ask.name} ({len(self.ask.prompt)} + {wanted} tokens, got {len(self.tokens)})"


def prompt_of(seed: int, number: int, isl_tokens: int) -> tuple[int, ...]:
    """Some begin as others do, so that workers find their blocks again."""
    rng = random.Random(f"{seed}:prompt:{number}")
    begins: list[int] = []
    if rng.random() < SHARED_CHANCE:
        shared = random.Random(f"{seed}:shared:{rng.randrange(2)}")
        begins = [shared.randrange(256) for _ in range(rng.choice((16, 64, 65, 128, 300)))]
    return tuple([*begins, *(rng.randrange(256) for _ in range(isl_tokens))][:isl_tokens])


def draw(rng: random.Random, seed: int, requests: int, *, over_s: float) -> list[Ask]:
    """Mixed lengths, short ones and the edges of blocks and chunks more often than chance would have them."""
    asks = []
    for number in range(requests):
        lengths = (1, 15, 16, 17, 63, 64, 65, 256, 257, MAX_PROMPT_TOKENS, rng.randint(1, MAX_PROMPT_TOKENS))
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 2, rng.randint(1, MAX_OUTPUT_TOKENS), rng.randint(20, MAX_OUTPUT_TOKENS))),
            temperature=rng.choice((0.0, 0.8)),
            seed=number,
            ignore_eos=rng.random() < 0.5,
        )
        prompt = prompt_of(seed, number, rng.choice(lengths))
        leaves_s = rng.choice((None, None, None, None, None, None, rng.expovariate(4.0), rng.uniform(0, 0.06)))
        events = rng.randint(0, 12) if leaves_s is None and rng.random() < 0.15 else None
        asks.append(Ask(f"client-{number}", rng.uniform(0, over_s), prompt, sampling, leaves_s, events))
    return sorted(asks, key=lambda ask: ask.at_s)


async def answers_of_one_engine(
    asks: list[Ask], *, eos_chance: float = EOS_CHANCE, make_runner: MakeRunner = SimRunner
) -> dict[str, tuple[list[int], str]]:
    """What a single aggregated engine gives for each: its tokens and how it ended."""
    config = EngineConfig(
        kind=EngineKind.SIM, model_name=MODEL, kv_blocks=4096, max_waiting=4096, sim=SimConfig(eos_chance=eos_chance)
    )
    engine = BatchingEngine(make_runner(config), config)
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
    """One client's request below the doors, to its end. Within the ingress' process."""
    world, ask = world_loop(), outcome.ask
    outcome.began_s = world.world_s
    leaving: asyncio.TimerHandle | None = None
    try:
        prepared = await frontend.prepare(_body(ask), chat=False, tenant=frontend.keyring.tenant_of(None))
        name = new_id("req")
        with frontend.exchange(prepared, name, received_s=world.time(), traceparent=traceparent) as exchange:

            def leave() -> None:
                if outcome.left_s is None:
                    outcome.left_s = world.world_s
                    exchange.outbox.close()

            if ask.leaves_after_s is not None:
                leaving = world.call_later(ask.leaves_after_s, leave)
            for saga in frontend.hub.sagas:
                if saga.work.sampling.seed == ask.sampling.seed:
                    _watch(saga, ask.leaves_after_events, leave)
            while not exchange.finished:
                for _, update in await exchange.updates():
                    if hasattr(update, "token_ids"):
                        outcome.first_s = world.world_s if outcome.first_s is None else outcome.first_s
                        outcome.tokens += update.token_ids
                    else:
                        outcome.finish = update.reason
    except IsthmusError as error:
        outcome.error = error
    finally:
        outcome.ended_s = world.world_s
        if leaving is not None:
            leaving.cancel()


def _body(ask: Ask) -> dict[str, object]:
    """As a client would write it."""
    return {
        "model": MODEL,
        "prompt": list(ask.prompt),
        "max_tokens": ask.sampling.max_tokens,
        "temperature": ask.sampling.temperature,
        "seed": ask.sampling.seed,
        "ignore_eos": ask.sampling.ignore_eos,
        "stream": True,
    }


def _watch(running: RunningSaga, leaves_after: int | None, leave: Callable[[], None]) -> None:
    """Its invariants hold after each event; the client leaves right after the one it is told to leave after."""
    feed, seen = running.feed, count(1)

    def watched(event: Event) -> None:
        feed(event)
        running.saga.check_invariants()
        if next(seen) == leaves_after:
            leave()

    vars(running)["feed"] = watched
    if leaves_after == 0:
        leave()


def verdict(outcome: Outcome, wanted: tuple[list[int], str], *, faults: bool, slack_s: float = 0.0) -> str | None:
    """What is wrong with how it ended; None if nothing is. `slack_s`: for how long its ingress may not have run."""
    tokens, finish = wanted
    who, code = outcome.request_text, outcome.error.code if outcome.error else None
    if outcome.tokens != tokens[: len(outcome.tokens)]:
        return f"{who} got other tokens: {outcome.tokens} where {tokens} was right"
    if outcome.crashed:
        return None
    if outcome.ended_s is None:
        return f"{who} never ended"
    if outcome.left_s is not None:
        if outcome.ended_s - outcome.left_s > LEAVE_S + slack_s:
            return f"{who} left at {outcome.left_s:.3f} s and ended only at {outcome.ended_s:.3f} s"
        if code == "cancelled" or (outcome.error is None and (outcome.tokens, outcome.finish) == (tokens, finish)):
            return None
        return None if faults and code not in NEVER else f"{who} left, and ended with {code}"
    if outcome.ended_s - outcome.began_s > REQUEST_TIMEOUT_S + GRACE_S + slack_s:
        return f"{who} ended {outcome.ended_s - outcome.began_s:.3f} s after it began"
    if outcome.error is None:
        if (outcome.tokens, outcome.finish) != (tokens, finish):
            return f"{who} ended with {outcome.finish} after {outcome.tokens}; right: {finish} after {tokens}"
        return None
    if code in NEVER or not faults:
        return f"{who} ended with {code}: {outcome.error.text}"
    return None
