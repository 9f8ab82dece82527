"""Workers whose steps have become slower than they were: heat, a noisy neighbour. Pure.

A worker's reference is what its steps have cost in the long run; each beat's steps are compared with it. The estimate
that routes go by (`estimates`) follows a change within a few beats anyhow; this says that there was one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus_planner.cost.online import LiveCosts, StepCosts
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.health import StepSample

SETTLED_STEPS = 48
"""Of a life, before what it costs counts as usual."""
SMOOTH = 0.25
"""Of the newest beat in the level: eight in ten of a change show after seven beats."""
ADOPT = 0.01
"""Of the present costs in the reference, at each beat of a worker that does not drift: a minute or so."""
DRIFTS = math.log(1.2)
"""Slower by a fifth: outside what batches and prompts of other lengths do to a linear law."""
RECOVERED = math.log(1.1)
QUIET = math.log(1.05)
"""A level below it is noise."""
NOISE_SIGMAS = 2.0
"""In addition to `DRIFTS`, of the level's own scatter."""
SCATTER_SHARE = 0.02
IN_A_ROW = 3
"""Beats above: no single long prompt makes a drift."""
ACCEPT_BEATS = 1200
"""Ten minutes at two beats a second: slower for so long is what the worker is now."""


@dataclass(slots=True)
class _Watched:
    reference: StepCosts | None = None
    level: float = 0.0
    """Logarithm of present over usual step times, smoothed."""
    scatter: float = 0.03
    seen: int = 0
    """Steps that the present costs rest on."""
    above: int = 0
    beats: int = 0
    """As drifting."""
    drifting: bool = False


class Drift:
    """As many as there are workers: `keep` drops the lives that have ended."""

    def __init__(self) -> None:
        self._watched: dict[Incarnation, _Watched] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def beat(self, life: Incarnation, live: LiveCosts, steps: Iterable[StepSample]) -> bool:
        """`steps`: new since the last one; `live`: what was learned with them. True: it begins to drift, or ends to."""
        seen = live.decode_seen + live.prefill_seen
        watched = self._watched.setdefault(life, _Watched())
        if seen < watched.seen:  # it learns anew: another model
            watched = self._watched[life] = _Watched()
        watched.seen = seen
        if watched.reference is None:
            if seen >= SETTLED_STEPS:
                watched.reference = live.costs
            return False
        ratios = [_ratio(watched.reference, step) for step in steps]
        if not ratios:
            return False
        newest = statistics.median(ratios)
        surprise = abs(newest - watched.level)
        watched.level += SMOOTH * (newest - watched.level)
        was = watched.drifting
        self._judge(watched, live.costs, surprise)
        return watched.drifting != was

    def slowdown(self, life: Incarnation) -> float:
        """Present over usual step times; 1 for one that is not known."""
        watched = self._watched.get(life)
        return 1.0 if watched is None else math.exp(watched.level)

    def is_drifting(self, life: Incarnation) -> bool:
        watched = self._watched.get(life)
        return watched is not None and watched.drifting

    def keep(self, alive: Iterable[Incarnation]) -> None:
        wanted = set(alive)
        self._watched = {life: watched for life, watched in self._watched.items() if life in wanted}

    @staticmethod
    def _judge(watched: _Watched, costs: StepCosts, surprise: float) -> None:
        assert watched.reference is not None
        bound = DRIFTS + NOISE_SIGMAS * watched.scatter
        watched.above = watched.above + 1 if watched.level > bound else 0
        if watched.drifting:
            watched.beats += 1
            if watched.level < RECOVERED or watched.beats >= ACCEPT_BEATS:
                watched.drifting, watched.beats = False, 0
                if watched.level >= RECOVERED:
                    watched.reference, watched.level = costs, 0.0
        elif watched.above >= IN_A_ROW:
            watched.drifting, watched.beats = True, 0
        elif watched.above == 0:
            watched.scatter += SCATTER_SHARE * (min(surprise, 0.5) - watched.scatter)
            share = ADOPT if abs(watched.level) < QUIET else ADOPT / 10  # else a change would hide itself
            watched.reference = _blend(watched.reference, costs, share)


def _ratio(usual: StepCosts, step: StepSample) -> float:
    expected_s = usual.step_s(step.decode_sequences, step.kv_tokens, step.prefill_tokens)
    return math.log(step.step_s / max(expected_s, 1e-9))


def _blend(usual: StepCosts, now: StepCosts, share: float) -> StepCosts:
    def between(old: float, new: float) -> float:
        return old + share * (new - old)

    return StepCosts(
        between(usual.base_s, now.base_s),
        between(usual.per_sequence_s, now.per_sequence_s),
        between(usual.per_kv_token_s, now.per_kv_token_s),
        between(usual.per_prefill_token_s, now.per_prefill_token_s),
    )
