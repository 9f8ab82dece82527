"""One client request in progress: its sagas on one side, the text of its answer on the other.

Both front doors use it alike: `updates()` until `finished`, then `close()` on every way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from isthmus_ingress.choice import Burst, Channels, Choice, Piece
from isthmus_ingress.detokenize import StopScanner
from isthmus_ingress.driver import Deps, RunningSaga, Work
from isthmus_ingress.harmony import HarmonyParser
from isthmus_ingress.hub import Hub
from isthmus_ingress.openai.errors import TooManyRequests
from isthmus_ingress.openai.render import Usage
from isthmus_ingress.outbox import Outbox
from isthmus_ingress.prepare import Prepared
from isthmus_ingress.saga import Saga
from isthmus_ingress.saga_types import ClientGone, Deliver, End, StopFound
from isthmus_ingress.text import ModelText
from isthmus_shared.errors import Cancelled, IsthmusError
from isthmus_shared.ids import TransferId, choice_id, new_id
from isthmus_shared.prefix import prefix_hashes
from isthmus_shared.tracing import Span, Tracing


@dataclass(frozen=True, slots=True)
class Limits:
    request_timeout_s: float
    attempts: int
    route_patience_s: float
    max_in_flight: int
    """Sagas, that is choices, of all requests together."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one choice, with text that was held back until it was known."""

    text: str
    reason: str


Update = tuple[Choice, Piece | Burst | Finished]


class Exchange:
    def __init__(
        self,
        prepared: Prepared,
        text: ModelText,
        hub: Hub,
        deps: Deps,
        limits: Limits,
        *,
        request_id: str,
        received_s: float,
        traceparent: str = "",
        meter: Callable[[int], None] | None = None,
    ) -> None:
        if hub.running + len(prepared.sampling) > limits.max_in_flight:
            raise TooManyRequests(
                "this ingress is serving as many requests as it may",
                why=f"{hub.running} of {limits.max_in_flight} are in progress",
                todo="try again shortly",
            )
        self.prepared, self._request_id = prepared, request_id
        self._meter = meter
        self._hub, self._metrics = hub, deps.metrics
        self._loop = asyncio.get_running_loop()
        self._received_s = received_s
        self._span = self._begin_span(deps.tracing, traceparent)
        self._first = True
        self.outbox = Outbox(self._loop)
        silent = frozenset(token for params in prepared.sampling for token in params.stop_token_ids)
        self.choices = [
            Choice(
                index,
                index // prepared.choices_per_prompt,
                text.tokenizer.detokenizer(),
                StopScanner(prepared.stops),
                silent,
                _channels(prepared, text),
            )
            for index in range(len(prepared.sampling))
        ]
        self._texts = text.tokenizer.json_texts
        self._bursts = prepared.stream and prepared.plain and not prepared.continuous_usage and _simple(self.choices)
        """Whether tokens that come as they usually do go on as a `Burst`."""
        self._first_s: list[float | None] = [None] * len(self.choices)
        self._last_s: list[float | None] = [None] * len(self.choices)
        """When each choice last had tokens."""
        self._cached: list[int | None] = [None] * len(prepared.prompts)
        """Of each prompt, before its first choice computed it."""
        self._prefixes = [prefix_hashes(prompt.token_ids, prepared.cache_salt) for prompt in prepared.prompts]
        self._open = len(self.choices)
        self.outcome: str | None = None
        """A code, once something else than the end of all choices has ended it."""
        deadline_s = received_s + limits.request_timeout_s
        self._sagas = [self._saga(choice, deps, deadline_s, limits) for choice in self.choices]

    def _begin_span(self, tracing: Tracing, traceparent: str) -> Span:
        """From receipt to the last token. The two clocks differ, so its start is told by its age."""
        return tracing.begin(
            "request",
            traceparent,
            start_s=tracing.now_s() - (self._loop.time() - self._received_s),
            endpoint="chat" if self.prepared.chat else "completions",
            prompt_tokens=self.prepared.prompt_tokens,
            choices=len(self.prepared.sampling),
        )

    def _saga(self, choice: Choice, deps: Deps, deadline_s: float, limits: Limits) -> RunningSaga:
        sampling = self.prepared.sampling[choice.index]
        work = Work(
            request_id=choice_id(self._request_id),
            transfer_id=TransferId(new_id("xfer")),
            model=self.prepared.model.name,
            prompt=self.prepared.prompts[choice.prompt].token_ids,
            sampling=sampling,
            cache_salt=self.prepared.cache_salt,
            prefix=self._prefixes[choice.prompt],
            tenant=self.prepared.tenant.name,
            slo=self.prepared.slo,
        )
        saga = Saga(
            max_tokens=sampling.max_tokens,
            deadline_s=deadline_s,
            max_attempts=limits.attempts,
            route_patience_s=limits.route_patience_s,
        )
        return RunningSaga(saga, work, deps, self.outbox, choice.index, self._hub.remove, parent=self._span)

    def start(self) -> None:
        self._metrics.requests_in_flight.inc()
        self._metrics.prompt_tokens.inc(self.prepared.prompt_tokens)
        self._metrics.tenant_prompt_tokens.labels(self.prepared.tenant.name).inc(self.prepared.prompt_tokens)
        self._metrics.request_prompt_tokens.observe(self.prepared.prompt_tokens)
        for saga in self._sagas:
            self._hub.add(saga)
            saga.start()

    @property
    def finished(self) -> bool:
        return self._open == 0

    @property
    def usage(self) -> Usage:
        """So far."""
        completion = sum(choice.tokens for choice in self.choices)
        return Usage(self.prepared.prompt_tokens, completion, sum(cached or 0 for cached in self._cached))

    async def updates(self) -> list[Update]:
        """What has come since the last call, waiting for something. Raises the request's error, or `Cancelled`
        when the client has gone."""
        items = await self.outbox.take()
        if self.outbox.closed:
            self.outcome = "client_gone"
            self._metrics.cancellations.inc()
            raise Cancelled("the client left")
        updates: list[Update] = []
        for index, effect in items:
            choice = self.choices[index]
            if choice.finish is not None:
                continue  # a stop string was found: what was under way is not shown
            if type(effect) is list:
                self._flow(choice, effect, updates)
            elif type(effect) is Deliver:
                self._take(choice, effect, updates)
            elif type(effect) is End:
                if effect.error is not None or effect.finish is None:
                    raise self._failed(effect.error)
                text = choice.end(effect.finish)
                assert choice.finish is not None
                updates.append((choice, Finished(text, choice.finish)))
                self._open -= 1
        return updates

    def _failed(self, error: IsthmusError | None) -> IsthmusError:
        if error is None or (isinstance(error, Cancelled) and not self.outbox.closed):
            # Only a reader too far behind is cancelled from here while it is still connected.
            error = Cancelled("the client does not read its answer")
        self.outcome = error.code
        return error

    def _flow(self, choice: Choice, token_ids: list[int], updates: list[Update]) -> None:
        if not self._bursts:
            self._take(choice, Deliver(choice.tokens, tuple(token_ids), None, 0), updates)
            return
        updates.append((choice, choice.burst(token_ids, self._texts)))
        self._time(choice.index, len(token_ids))

    def _take(self, choice: Choice, deliver: Deliver, updates: list[Update]) -> None:
        piece = choice.take(deliver)
        self._time(choice.index, len(piece.token_ids))
        if deliver.output_index == 0:
            known = self._cached[choice.prompt]
            self._cached[choice.prompt] = deliver.cached_tokens if known is None else min(known, deliver.cached_tokens)
        updates.append((choice, piece))
        if piece.stopped:
            self._sagas[choice.index].feed(StopFound())
            updates.append((choice, Finished("", "stop")))
            self._open -= 1

    def _time(self, choice: int, tokens: int) -> None:
        now_s, last_s = self._loop.time(), self._last_s[choice]
        if self._first:
            self._first = False
            self._span.event("first_token")
            self._metrics.time_to_first_token_seconds.observe(now_s - self._received_s)
            route = self._sagas[choice].route
            if route is not None:
                self._metrics.request_predicted_ttft_seconds.observe(route.predicted.ttft_p50_s)
                self._hub.recent.first_token(now_s - self._received_s, route.predicted.ttft_p50_s)
        if last_s is not None:
            self._metrics.inter_token_latency_seconds.observe((now_s - last_s) / max(1, tokens))
        else:
            self._first_s[choice] = now_s
        self._last_s[choice] = now_s
        self._metrics.generation_tokens.inc(tokens)
        if self._meter is not None:
            self._meter(tokens)

    def close(self) -> None:
        """Nobody waits any more: what is still running is cancelled. Call once after `start`."""
        for saga in self._sagas:
            if not saga.saga.over:
                saga.feed(ClientGone())
        outcome = self.outcome or ("ok" if self.finished else "client_gone")
        output_tokens = sum(choice.tokens for choice in self.choices)
        self._span.end(error="" if outcome == "ok" else outcome, output_tokens=output_tokens)
        tenant = self.prepared.tenant.name
        self._metrics.tenant_requests.labels(tenant, outcome).inc()
        self._metrics.tenant_generation_tokens.labels(tenant).inc(output_tokens)
        for choice in self.choices:
            self._count_choice(choice, outcome)
        self._metrics.requests.labels("chat" if self.prepared.chat else "completions", outcome).inc()
        self._metrics.requests_in_flight.dec()
        self._metrics.e2e_request_latency_seconds.observe(self._loop.time() - self._received_s)

    def _count_choice(self, choice: Choice, outcome: str) -> None:
        gave_up = "abort" if outcome in ("client_gone", Cancelled.code) else "error"
        self._metrics.request_success.labels(choice.finish or gave_up).inc()
        self._metrics.request_generation_tokens.observe(choice.tokens)
        first_s, last_s = self._first_s[choice.index], self._last_s[choice.index]
        if first_s is not None and last_s is not None and choice.tokens > 1:
            mean_s = (last_s - first_s) / (choice.tokens - 1)
            self._metrics.request_time_per_output_token_seconds.observe(mean_s)
            route = self._sagas[choice.index].route
            if self.finished and route is not None:
                self._hub.recent.inter_token(mean_s, route.predicted.itl_p50_s)


def _simple(choices: list[Choice]) -> bool:
    return all(choice.simple for choice in choices)


def _channels(prepared: Prepared, text: ModelText) -> Channels | None:
    """A chat with a model that answers on channels; completions show what the model writes."""
    if text.harmony is None or not prepared.chat:
        return None
    return Channels(HarmonyParser(text.harmony, text.tokenizer.token_bytes), text.tokenizer.detokenizer())
