"""From heartbeats and what was learned of steps to what workers can do. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from isthmus_planner.cost.online import LiveCosts, StepCosts
from isthmus_planner.cost.speeds import LEARNED_STEPS
from isthmus_planner.roles.capacity import Ability
from isthmus_shared.ids import Incarnation
from isthmus_shared.messages.health import ProcessState, Role, WorkerHeartbeat

CHUNK_TOKENS = 256
"""Prompt tokens in a step of a worker that has not shown any yet."""

Form = tuple[str, str]
"""Workers of one model exchange KV when both are equal: the weights' fingerprint and the KV's form."""


def pools(beats: Iterable[WorkerHeartbeat]) -> dict[str, tuple[WorkerHeartbeat, ...]]:
    """Of each model, the ready workers that can divide its work between them: those with a relay and of the form that
    most of them have."""
    by_model: dict[str, dict[Form, list[WorkerHeartbeat]]] = {}
    for beat in beats:
        if beat.state is ProcessState.READY and beat.relay is not None:
            forms = by_model.setdefault(beat.model, {})
            forms.setdefault((beat.model_fingerprint, beat.kv_form), []).append(beat)
    chosen: dict[str, tuple[WorkerHeartbeat, ...]] = {}
    for model, forms in by_model.items():
        most = max(len(members) for members in forms.values())
        chosen[model] = tuple(next(forms[form] for form in sorted(forms) if len(forms[form]) == most))
    return chosen


def abilities(
    beats: Sequence[WorkerHeartbeat], learned: Mapping[Incarnation, LiveCosts], prior: StepCosts
) -> tuple[Ability, ...]:
    """Of one model's workers. A cost that a worker has not shown is taken to be the middle of the others', and where
    nobody has shown it, the prior's."""
    known = [learned[beat.incarnation] for beat in beats if beat.incarnation in learned]
    decoded = [live.costs for live in known if live.decode_seen >= LEARNED_STEPS]
    prefilled = [live for live in known if live.prefill_seen >= LEARNED_STEPS]
    per_sequence_s = _middle([costs.per_sequence_s for costs in decoded], prior.per_sequence_s)
    per_kv_token_s = _middle([costs.per_kv_token_s for costs in decoded], prior.per_kv_token_s)
    decode_base_s = _middle([costs.base_s for costs in decoded], prior.base_s)
    per_prefill_token_s = _middle([live.costs.per_prefill_token_s for live in prefilled], prior.per_prefill_token_s)
    chunk = int(_middle([float(live.chunk_tokens) for live in prefilled], CHUNK_TOKENS))

    def of(beat: WorkerHeartbeat) -> Ability:
        live = learned.get(beat.incarnation)
        decodes = live is not None and live.decode_seen >= LEARNED_STEPS
        prefills = live is not None and live.prefill_seen >= LEARNED_STEPS
        own = prior if live is None else live.costs
        return Ability(
            worker_id=beat.worker_id,
            incarnation=beat.incarnation,
            roles=beat.roles,
            able=frozenset(beat.roles_able or beat.roles),
            costs=StepCosts(
                base_s=own.base_s if decodes or prefills else decode_base_s,
                per_sequence_s=own.per_sequence_s if decodes else per_sequence_s,
                per_kv_token_s=own.per_kv_token_s if decodes else per_kv_token_s,
                per_prefill_token_s=own.per_prefill_token_s if prefills else per_prefill_token_s,
            ),
            chunk_tokens=live.chunk_tokens if live is not None and prefills else chunk,
            kv_tokens=beat.load.kv_blocks_total * beat.kv_block_tokens,
            max_batch=beat.max_batch,
            decode_seen=0 if live is None else live.decode_seen,
            prefill_seen=0 if live is None else live.prefill_seen,
        )

    return tuple(of(beat) for beat in beats)


def holders(beats: Iterable[WorkerHeartbeat], role: Role) -> tuple[WorkerHeartbeat, ...]:
    return tuple(beat for beat in beats if role in beat.roles)


def _middle(values: Sequence[float], otherwise: float) -> float:
    return statistics.median(values) if values else otherwise
