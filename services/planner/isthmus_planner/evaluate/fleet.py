"""Simulated workers from the cost model's profiles, and the mixes of hardware that policies are compared on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus_planner.cost import catalog, kv, memory
from isthmus_planner.cost.calibration import packaged
from isthmus_planner.cost.calibration.store import Question
from isthmus_planner.cost.laws import decode_law, prefill_law
from isthmus_planner.cost.layout import Layout
from isthmus_planner.cost.profiles import ModelProfile
from isthmus_planner.evaluate.engine import EngineSpec
from isthmus_planner.sim.from_cost import decode_table, prefill_table
from isthmus_shared.messages.health import Role

MODEL = "gpt-oss-120b"
MAX_BATCH = 256
CHUNK_TOKENS = 2048
"""Of a worker that decodes: what a prompt's part adds to everyone's step."""
PREFILL_CHUNK_TOKENS = 8192
"""Of one that only prefills: nobody waits for its step."""
LANE_BYTES_PER_S = 12e9
"""What a relay sends or takes: host-staged, a 200 Gb/s card at half its rate."""
LANE_SETUP_S = 0.004

PREFILL, DECODE, BOTH = (Role.PREFILL,), (Role.DECODE,), (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    name: str
    vendor: str
    roles: tuple[Role, ...]
    engine: EngineSpec
    kv_form: str
    kv_bytes_per_token: float
    kv_bytes_per_prompt: float
    """Of a prompt, whatever its length: windowed layers."""
    lane_bytes_per_s: float = LANE_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Kind:
    """So many replicas of one accelerator type with the same roles."""

    count: int
    accelerator: str
    tp: int
    roles: tuple[Role, ...]


@dataclass(frozen=True, slots=True)
class Mix:
    name: str
    title: str
    kinds: tuple[Kind, ...]

    def workers(self) -> tuple[WorkerSpec, ...]:
        return tuple(
            _worker(kind, f"{kind.accelerator}-{number}") for kind in self.kinds for number in range(kind.count)
        )


MIXES = (
    Mix("split", "4 x H100 prefill, 4 x MI300X decode", (Kind(4, "h100", 2, PREFILL), Kind(4, "mi300x", 2, DECODE))),
    Mix(
        "flexible",
        "2 x H200, 4 x MI300X, 2 x MI325X, all of them both",
        (Kind(2, "h200", 2, BOTH), Kind(4, "mi300x", 2, BOTH), Kind(2, "mi325x", 2, BOTH)),
    ),
    Mix(
        "uneven",
        "2 x H100 prefill, 2 x MI300X both, 4 x MI308X both (a fifth of the arithmetic)",
        (Kind(2, "h100", 2, PREFILL), Kind(2, "mi300x", 2, BOTH), Kind(4, "mi308x", 1, BOTH)),
    ),
)


def _worker(kind: Kind, name: str) -> WorkerSpec:
    accelerator, model, layout = catalog.accelerator(kind.accelerator), catalog.model(MODEL), Layout(tp=kind.tp)
    constants = packaged.constants().constants_for(Question(accelerator, model, layout))
    engine = EngineSpec(
        prefill=prefill_table(prefill_law(accelerator, model, layout, constants)),
        decode=decode_table(decode_law(accelerator, model, layout, constants), MAX_BATCH),
        kv_capacity_tokens=int(memory.fit(accelerator, model, layout).kv_tokens),
        chunk_tokens=PREFILL_CHUNK_TOKENS if kind.roles == PREFILL else CHUNK_TOKENS,
        interference=constants.interference,
    )
    return WorkerSpec(
        name=name,
        vendor=accelerator.vendor,
        roles=kind.roles,
        engine=engine,
        kv_form=_kv_form(model),
        kv_bytes_per_token=kv.full_bytes_per_token(model, layout),
        kv_bytes_per_prompt=kv.window_bytes_per_sequence(model, layout),
    )


def _kv_form(model: ModelProfile) -> str:
    """As workers tell it (`kv.negotiate.kv_form`), every second layer a windowed one."""
    full = ",".join(str(2 * i) for i in range(model.full_layers))
    windowed = ",".join(str(2 * i + 1) for i in range(model.window_layers))
    head = f"h{model.kv_heads}d{model.head_dim}"
    return f"bf16/{model.name}/full[{full}]{head};slidingw{model.window_tokens}[{windowed}]{head}"


def capacity_per_s(workers: tuple[WorkerSpec, ...], isl_tokens: float, osl_tokens: float, itl_s: float) -> float:
    """Requests of these lengths that the workers could serve per second, were every moment of each used, at batches
    that just meet `itl_s`: prefill goes where it is cheapest against decode. An upper bound; nothing reaches it.
    """
    seconds = sorted((_seconds(worker, isl_tokens, osl_tokens, itl_s) for worker in workers), key=_comparative)
    low, high = 0.0, sum(1.0 / min(pair) for pair in seconds)
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if _enough(seconds, rate) else (low, rate)
    return low


def _seconds(worker: WorkerSpec, isl_tokens: float, osl_tokens: float, itl_s: float) -> tuple[float, float]:
    """Of a worker's time for one request's prefill, and for its decode; infinite for a role that it has not."""
    table, context = worker.engine.decode, isl_tokens + osl_tokens / 2
    batch = 1
    while (
        batch < table.max_batch
        and table.step_s(batch + 1, (batch + 1) * context) <= itl_s
        and (batch + 1) * (isl_tokens + osl_tokens) <= worker.engine.kv_capacity_tokens
    ):
        batch += 1
    prefill_s = worker.engine.prefill.time_s(isl_tokens) - worker.engine.prefill.base_s
    decode_s = osl_tokens * table.step_s(batch, batch * context) / batch
    return (
        prefill_s if Role.PREFILL in worker.roles or Role.DECODE in worker.roles else math.inf,
        decode_s if Role.DECODE in worker.roles else math.inf,
    )


def _comparative(seconds: tuple[float, float]) -> float:
    return seconds[0] / seconds[1]


def _enough(seconds: list[tuple[float, float]], rate: float) -> bool:
    prefills_left, decodes = rate, 0.0
    for prefill_s, decode_s in seconds:
        share = min(1.0, prefills_left * prefill_s)
        prefills_left -= share / prefill_s
        decodes += (1.0 - share) / decode_s
    return prefills_left <= 1e-12 and decodes >= rate
