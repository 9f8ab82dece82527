"""What a run does, drawn from its seed: how large the cluster is, who asks for what and when, what fails.

A plan is plain data: it can be cut down (`shrinking`), written to a file and run again.
"""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from typing import Any

from isthmus_shared.messages.health import Role
from isthmus_shared.messages.work import SamplingParams
from isthmus_sim.cluster import Size
from isthmus_sim.faults import Fault, Planned, plan_faults
from isthmus_sim.load import Ask, draw, prompt_of

LOAD_S, FAULTS_S = 1.5, 2.5
SKEWS = (0.0, 0.0, 0.001, 0.05)
"""Of the clocks' rates, largest: a host's crystal is off by less than 0.001; a guest's clock may be off by more."""
LATE_ASKS = 4


@dataclass(frozen=True)
class Plan:
    seed: int
    size: Size
    faults: tuple[Planned, ...]
    asks: tuple[Ask, ...]
    late: tuple[Ask, ...]
    """What is asked once everything has healed, and must succeed."""

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "size": dataclasses.asdict(self.size),
            "faults": [dataclasses.asdict(each) for each in self.faults],
            "asks": [_ask_as_json(ask) for ask in self.asks],
            "late": [_ask_as_json(ask) for ask in self.late],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Raises `KeyError`, `TypeError` or `ValueError` for what is no plan."""
        seed = int(data["seed"])
        return cls(
            seed,
            Size(**{**data["size"], "able": tuple(map(Role, data["size"].get("able", ())))}),
            tuple(Planned(**{**each, "fault": Fault(each["fault"])}) for each in data["faults"]),
            tuple(_ask_from_json(seed, each) for each in data["asks"]),
            tuple(_ask_from_json(seed, each) for each in data["late"]),
        )

    def text(self) -> list[str]:
        """For people."""
        size = self.size
        return [
            f"{size.planners} planner(s), {size.ingresses} ingress(es), relays of {size.slots} slots, "
            f"clocks within {100 * size.skew:g} %",
            *(f"  {planned.text}" for planned in self.faults),
            *(f"  {_ask_text(ask)}" for ask in self.asks),
            f"  then {len(self.late)} more",
        ]


def draw_plan(seed: int) -> Plan:
    rng = random.Random(f"{seed}:plan")
    faults = plan_faults(rng, over_s=FAULTS_S)
    count = rng.randint(8, 28)
    asks = draw(rng, seed, count + LATE_ASKS, over_s=LOAD_S)
    size = Size(
        slots=rng.choice((48, 64, 128)),
        planners=rng.randint(1, 2),
        ingresses=rng.randint(1, 2),
        skew=rng.choice(SKEWS),
    )
    first = tuple(ask for ask in asks if ask.sampling.seed < count)
    return Plan(seed, size, faults, first, tuple(ask for ask in asks if ask.sampling.seed >= count))


def _ask_text(ask: Ask) -> str:
    leaves = "" if ask.leaves_after_s is None else f", leaves after {ask.leaves_after_s:.3f} s"
    if ask.leaves_after_events is not None:
        leaves = f", leaves after event {ask.leaves_after_events}"
    return f"{ask.name} at {ask.at_s:.3f} s: {len(ask.prompt)} + {ask.sampling.max_tokens} tokens{leaves}"


def _ask_as_json(ask: Ask) -> dict[str, Any]:
    return {
        "number": ask.sampling.seed,
        "at_s": ask.at_s,
        "isl_tokens": len(ask.prompt),
        "osl_tokens": ask.sampling.max_tokens,
        "temperature": ask.sampling.temperature,
        "ignore_eos": ask.sampling.ignore_eos,
        "leaves_after_s": ask.leaves_after_s,
        "leaves_after_events": ask.leaves_after_events,
    }


def _ask_from_json(seed: int, data: dict[str, Any]) -> Ask:
    number = int(data["number"])
    sampling = SamplingParams(
        max_tokens=data["osl_tokens"],
        temperature=data["temperature"],
        seed=number,
        ignore_eos=data["ignore_eos"],
    )
    prompt = prompt_of(seed, number, data["isl_tokens"])
    leaves = data["leaves_after_s"], data["leaves_after_events"]
    return Ask(f"client-{number}", data["at_s"], prompt, sampling, *leaves)


def dumps(plan: Plan) -> str:
    return json.dumps(plan.as_json(), indent=1)
