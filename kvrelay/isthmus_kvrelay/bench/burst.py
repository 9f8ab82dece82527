"""The burst: many prefills land at once on a node that decodes; what that does to inter-token latency."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus_kvrelay.bench.children import Child
from isthmus_kvrelay.bench.contenders import RelayContender
from isthmus_kvrelay.bench.workloads import MIB

FLOWS = 32
FLOW_BYTES = 8 * MIB
QUIET_S = 2.0
PACED_RATE = 256 * MIB
"""Bytes per second of the paced run: the burst takes a second instead of a tenth."""
MIN_STEPS = 200
"""Bursts are repeated until so many steps were seen under them: an unpaced one is over within a dozen."""
MAX_BURSTS = 40

HOST_US_PER_STEP = 300.0
"""Of a step of 6.5 ms: what receiving may cost."""
OFF: dict[str, Any] = {"work_requests": None, "kv_block_credit": False, "host_us_per_step": 0.0, "feedback": False}
ON: dict[str, Any] = {"work_requests": 32, "kv_block_credit": True, "host_us_per_step": HOST_US_PER_STEP}
RATE = {"ISTHMUS_RELAY_RATE_BYTES_PER_S": str(PACED_RATE)}


@dataclass(frozen=True, slots=True)
class Variant:
    settings: dict[str, str]
    core: dict[str, Any]


VARIANTS: dict[str, Variant] = {
    "unpaced, staging bytes only": Variant({}, OFF),
    "paced by the planner's rate": Variant(RATE, OFF),
    "paced by decode's own latency": Variant({}, {**OFF, "feedback": True}),
    "all credits, no pacing": Variant({}, {**ON, "feedback": False}),
    "… without host time": Variant({}, {**ON, "feedback": False, "host_us_per_step": 0.0}),
    "… without work requests": Variant({}, {**ON, "feedback": False, "work_requests": None}),
    "… without KV blocks": Variant({}, {**ON, "feedback": False, "kv_block_credit": False}),
    "all credits and both paces": Variant(RATE, {**ON, "feedback": True}),
}
"""Settings of both relays. Staging bytes cannot be taken away: without them there is nowhere to land."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Inter-token latency in seconds, without and under bursts; how long one burst took to land."""

    quiet_p50_s: float
    quiet_p99_s: float
    burst_p50_s: float
    burst_p99_s: float
    took_s: float
    bursts: int
    steps: int

    @property
    def p99_rise(self) -> float:
        """0.05 is five percent."""
        return self.burst_p99_s / self.quiet_p99_s - 1


def measure_burst(folder: Path, variant: Variant) -> Burst:
    relays = RelayContender(folder, settings=variant.settings, core=variant.core)
    try:
        decode = Child("isthmus_kvrelay.bench.decode_process", "--socket", str(relays.target_socket))
        try:
            decode.answer()
            return _run(relays, decode)
        finally:
            decode.close()
    finally:
        relays.close()


def _run(relays: RelayContender, decode: Child) -> Burst:
    decode.ask(do="burst", tickets=relays.prepare(FLOWS, FLOW_BYTES))  # the first one touches the pages
    decode.ask(do="quiet", seconds=QUIET_S / 2)
    quiet = decode.ask(do="quiet", seconds=QUIET_S)["itl_s"]
    under: list[float] = []
    took_s: list[float] = []
    while len(took_s) < MAX_BURSTS and len(under) < MIN_STEPS:
        found = decode.ask(do="burst", tickets=relays.prepare(FLOWS, FLOW_BYTES))
        under += found["itl_s"]
        took_s.append(found["took_s"])
    quiet += decode.ask(do="quiet", seconds=QUIET_S)["itl_s"]
    before, during = (statistics.quantiles(gaps, n=100, method="inclusive") for gaps in (quiet, under))
    return Burst(before[49], before[98], during[49], during[98], statistics.median(took_s), len(took_s), len(under))


def measure_bursts(folder: Path, *, say: Callable[[str], None]) -> dict[str, Burst]:
    found = {}
    for number, (name, variant) in enumerate(VARIANTS.items()):
        place = folder / f"burst-{number}"
        place.mkdir()
        found[name] = measure_burst(place, variant)
        each = found[name]
        say(
            f"burst {name}: ITL p99 {each.quiet_p99_s * 1e3:.2f} → {each.burst_p99_s * 1e3:.2f} ms, {each.took_s:.2f} s"
        )
    return found
