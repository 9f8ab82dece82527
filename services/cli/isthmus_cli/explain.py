"""`isthmus explain`: why a request went where it went, and what became of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from isthmus_cli.dialling import dial
from isthmus_cli.status import CONNECT_S, in_ms, new_table
from isthmus_shared.bus.port import Bus, Subscription
from isthmus_shared.errors import InvalidRequest, NoResponders
from isthmus_shared.ids import RequestId
from isthmus_shared.messages import subjects
from isthmus_shared.messages.outcomes import Candidate, ExplainReply, ExplainRequest, Explanation, Outcome
from isthmus_shared.messages.route import Mode, Prediction

ANSWER_S = 1.0
"""For the first planner that knows the request: they answer out of memory."""
OTHERS_S = 0.2
"""And for the others, after it: a request that was planned anew may have been routed by several."""

ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")
"""Which an answer's `id` has before that of the request."""


async def fetch(bus_url: str, request: str) -> list[Explanation]:
    """Oldest first. Raises `NoResponders` without a planner, `InvalidRequest` when none knows the request."""
    bus = await dial(bus_url, name="isthmus explain", timeout_s=CONNECT_S)
    async with bus:
        return await ask(bus, request)


async def ask(bus: Bus, request: str, *, answer_s: float = ANSWER_S, others_s: float = OTHERS_S) -> list[Explanation]:
    found = await _ask(bus, request, answer_s, others_s)
    for prefix in ANSWER_PREFIXES:
        if not found and request.startswith(prefix):
            found = await _ask(bus, request.removeprefix(prefix), answer_s, others_s)
    if not found:
        raise InvalidRequest(
            f"no planner knows the request {request!r}",
            why="they keep the latest 4096 that they have routed, and only while they live; "
            "one that the ingress refused never came to them",
            todo="give the id of the answer's x-request-id header, soon after the request",
            param="request_id",
        )
    return found


async def _ask(bus: Bus, request: str, answer_s: float, others_s: float) -> list[Explanation]:
    found: list[Explanation] = []
    question = ExplainRequest(request_id=RequestId(request)).encode()
    inbox = bus.new_inbox()
    async with bus.subscribe(inbox) as answers:
        await bus.publish(subjects.EXPLAIN, question, reply=inbox)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(answer_s) as bound:
                await _collect(answers, found, bound, others_s)
    return sorted(found, key=lambda each: -each.age_s)


async def _collect(answers: Subscription, found: list[Explanation], bound: asyncio.Timeout, others_s: float) -> None:
    loop = asyncio.get_running_loop()
    async for message in answers:
        if not message.data and message.headers.get("Status") == "503":
            raise NoResponders("no planner is there to be asked", todo="see `isthmus status`")
        found.extend(ExplainReply.decode(message.data).explanations)
        bound.reschedule(loop.time() + others_s)


def as_fields(explanations: list[Explanation]) -> dict[str, Any]:
    return {"explanations": [each.model_dump(mode="json") for each in explanations]}


def shown(explanations: list[Explanation]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    routes = Counter(each.request_id for each in explanations)  # a request's choices are sequences of their own
    numbers: Counter[RequestId] = Counter()
    for each in explanations:
        numbers[each.request_id] += 1
        number, of = numbers[each.request_id], routes[each.request_id]
        parts += _explanation(each, f"route {number} of {of}" if of > 1 else "route")
    return parts


def _resumes(candidate: Candidate) -> bool:
    """Its decode worker fetches what is staged already, and nobody prefills."""
    return candidate.mode is Mode.DISAGGREGATED and candidate.prefill is None


def _explanation(each: Explanation, title: str) -> list[RenderableType]:
    facts = [
        f"{title} of {each.request_id}, {each.age_s:.1f} s ago, by planner {each.planner}",
        f"{each.isl_tokens} prompt tokens, at most {each.max_osl_tokens} of answer",
    ]
    if each.tenant:
        facts.append(f"tenant {each.tenant}")
    if each.slo_class:
        facts.append(f"class {each.slo_class}")
    if each.chosen is not None and _resumes(each.chosen):
        facts.append("goes on from staged KV")
    if each.waited_s:
        facts.append(f"waited {in_ms(each.waited_s)} in line")
    parts: list[RenderableType] = [Text("; ".join(facts))]
    if each.candidates:
        parts.append(_candidates(each))
    if each.not_shown:
        parts.append(Text(f"{each.not_shown} more were weighed and are worse"))
    if each.refusals:
        told = ", ".join(f"{count} x {reason}" for reason, count in sorted(each.refusals.items()))
        parts.append(Text(f"left out: {told}"))
    parts.append(Text.assemble(("refused: " if each.chosen is None else "why: ", "bold"), each.why))
    if each.outcome is not None:
        # The times are the client's, over all attempts: of a request that was routed anew, not what was predicted here.
        alone = each.chosen if each.outcome.attempts == 1 else None
        parts.append(_outcome(each.outcome, None if alone is None else alone.predicted))
    elif each.chosen is not None:
        parts.append(Text("no outcome yet, or this was not its last attempt"))
    return parts


def _candidates(each: Explanation) -> Table:
    names = list(dict.fromkeys(name for candidate in each.candidates for name in candidate.scores))
    made = new_table(
        "candidates", "", "prefill", "decode", "TTFT p50", "p90", "ITL", "cached", "crossing", "score", *names
    )
    for candidate in each.candidates:
        made.add_row(
            "→" if candidate == each.chosen else "",
            candidate.prefill.worker_id if candidate.prefill else "(staged)" if _resumes(candidate) else "(same)",
            candidate.decode.worker_id,
            *_predicted(candidate),
            in_ms(sum(candidate.scores.values())),
            *(in_ms(candidate.scores[name]) if candidate.scores.get(name) else "" for name in names),
        )
    return made


def _predicted(candidate: Candidate) -> tuple[str, str, str, str, str]:
    predicted = candidate.predicted
    if predicted is None:
        return ("–",) * 5
    crossing = "" if predicted.transfer_s is None else in_ms(predicted.transfer_s)
    cached = str(predicted.cached_tokens) if predicted.cached_tokens else ""
    return in_ms(predicted.ttft_p50_s), in_ms(predicted.ttft_p90_s), in_ms(predicted.itl_p50_s), cached, crossing


def _outcome(outcome: Outcome, predicted: Prediction | None) -> Table:
    made = new_table("what happened", "", "predicted", "actual", "off by")
    pairs = [
        ("TTFT", None if predicted is None else predicted.ttft_p50_s, outcome.ttft_s),
        ("ITL, mean", None if predicted is None else predicted.itl_p50_s, outcome.itl_s),
    ]
    for name, expected_s, actual_s in pairs:
        off = f"{expected_s / actual_s - 1:+.0%}" if expected_s is not None and actual_s else "–"
        made.add_row(name, *("–" if each is None else in_ms(each) for each in (expected_s, actual_s)), off)
    made.add_row("whole answer", "", in_ms(outcome.e2el_s), "")
    made.add_row("end", "", f"{outcome.finish or 'left'} after {outcome.osl_tokens} tokens", "")
    made.add_row("attempts", "", str(outcome.attempts), "")
    return made
