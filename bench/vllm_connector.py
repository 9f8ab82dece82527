"""What arriving transfers cost the sequences that a vLLM engine is decoding, and what the connector's hooks take.

    make bench-vllm ARGS="[--rounds 5] [--residents 8] [--tokens 768]"

Two vLLM CPU engines on a core each, two relays over TCP in this process. Prompts are prefilled and staged first, so
that the prefill engine rests. Then, in turn, residents decode (a) alone, (b) while requests of one token join at the
same moments as in (c), but without a transfer, (c) while requests join whose KV comes from the other engine. All that
join end with their first token. (c) against (a) is the price of arrivals, (c) against (b) that of the transfers alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("shared", "kvrelay", "tests/support")]

from isthmus_kvrelay.client.vllm.stats import percentile  # noqa: E402
from isthmus_testing.relay import daemon_settings, running  # noqa: E402
from isthmus_testing.tiny_checkpoints import Family, write_tiny_checkpoint  # noqa: E402
from isthmus_testing.vllm_engines import (  # noqa: E402
    MIB,
    Engine,
    arguments,
    connected,
    engine_host,
    prompt_of,
    vllm_missing,
)

MODES = ("alone", "joining", "loading")
WARM_UP_TOKENS = 20
"""Of each resident: its prefill and the first steps of a round are not measured."""


@dataclass
class Figures:
    rounds: int
    residents: int
    prompt_tokens: int
    arrivals_per_round: int
    transfer_bytes: int = 0
    loads: int = 0
    itl_p50_ms: dict[str, float] = field(default_factory=dict)
    itl_p99_ms: dict[str, float] = field(default_factory=dict)
    hook_p99_us: dict[str, float] = field(default_factory=dict)
    hook_steps: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        rows = [f"{mode:8}  {self.itl_p50_ms[mode]:9.2f}  {self.itl_p99_ms[mode]:9.2f}" for mode in MODES]
        against = {mode: self.itl_p99_ms["loading"] / self.itl_p99_ms[mode] - 1 for mode in MODES[:2]}
        hooks = ", ".join(f"{name} {value:.0f} us" for name, value in self.hook_p99_us.items())
        return "\n".join(
            (
                f"{self.residents} residents, {self.loads} loads of {self.transfer_bytes / MIB:.2f} MiB",
                "mode      p50 ITL ms  p99 ITL ms",
                *rows,
                *(f"p99 with transfers against {mode}: {share:+.1%}" for mode, share in against.items()),
                f"p99 time in hooks per step with a load under way: {hooks}",
            )
        )


async def stage(prefill: Engine, prompts: list[list[int]]) -> list[dict[str, Any]]:
    answers = await asyncio.gather(*(prefill.generate(prompt, 1, {"do_remote_decode": True}) for prompt in prompts))
    return [answer.kv_transfer_params or {} for answer in answers]


async def one_round(decode: Engine, mode: str, options: argparse.Namespace, joining: list[Any]) -> list[float]:
    """Seconds between tokens of all residents."""
    tokens = options.steps + WARM_UP_TOKENS
    residents = [
        asyncio.create_task(decode.generate(prompt_of(64, 100 + index), tokens)) for index in range(options.residents)
    ]
    await asyncio.sleep(options.settle_s)
    arriving = []
    for prompt, params in joining if mode != "alone" else ():
        asked = (prompt, params) if mode == "loading" else ([5], None)
        arriving.append(asyncio.create_task(decode.generate(asked[0], 1, asked[1])))
        await asyncio.sleep(options.interval_s)
    answers = await asyncio.gather(*residents)
    await asyncio.gather(*arriving)
    times = [answer.times_s[WARM_UP_TOKENS:] for answer in answers]
    return [later - earlier for one in times for earlier, later in pairwise(one)]


async def measure(options: argparse.Namespace) -> Figures:
    figures = Figures(options.rounds, options.residents, options.tokens, options.arrivals)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_checkpoint(folder / "llama", Family.LLAMA)
        settings = [daemon_settings(folder, node, total_slots=256, slot_bytes=MIB) for node in ("a", "b")]
        async with running(settings[0]) as near, running(settings[1]) as far, engine_host(folder) as host:
            sockets = [node.daemon.settings.socket for node in (near, far)]
            prefill = await host.engine(
                **arguments(model, kv_transfer_config=connected("kv_producer", sockets[0], deadline_s=600))
            )
            decode = await host.engine(
                core=1,
                **arguments(
                    model,
                    kv_transfer_config=connected("kv_consumer", sockets[1]),
                    enable_prefix_caching=False,
                    kv_cache_memory_bytes=128 * MIB,
                ),
            )
            gaps: dict[str, list[float]] = {mode: [] for mode in MODES}
            await one_round(decode, "alone", options, [])
            for number in range(options.rounds):
                prompts = [prompt_of(options.tokens, 1000 * number + index) for index in range(options.arrivals)]
                joining = list(zip(prompts, await stage(prefill, prompts), strict=True))
                for mode in MODES:
                    gaps[mode] += await one_round(decode, mode, options, joining)
            await fill(figures, gaps, decode, far.daemon.stats().received_bytes)
    return figures


async def fill(figures: Figures, gaps: dict[str, list[float]], decode: Engine, received_bytes: int) -> None:
    state = await decode.state()
    figures.loads = state["totals"]["loaded"]
    figures.transfer_bytes = received_bytes // max(1, figures.loads)
    for mode, values in gaps.items():
        figures.itl_p50_ms[mode] = percentile(values, 0.5) * 1e3
        figures.itl_p99_ms[mode] = percentile(values, 0.99) * 1e3
    for name, values in state["hook_us"].items():
        figures.hook_p99_us[name], figures.hook_steps[name] = percentile(values, 0.99), len(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--residents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=768, help="of each prompt whose KV arrives")
    parser.add_argument("--arrivals", type=int, default=10, help="a round")
    parser.add_argument("--interval-s", type=float, default=0.25, help="between two arrivals")
    parser.add_argument("--settle-s", type=float, default=0.5, help="before the first one")
    parser.add_argument("--steps", type=int, default=800, help="measured tokens of each resident and round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (missing := vllm_missing()) is not None:
        print(missing)
        return 1
    figures = asyncio.run(measure(options))
    print(figures.text())
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(figures), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
