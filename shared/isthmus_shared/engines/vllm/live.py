"""One request on its way through the vLLM engine, and what vLLM is asked and says of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from isthmus_shared.engines.port import EngineRequest, SequenceOutput
from isthmus_shared.engines.vllm.flows import HeldSink, HeldSource
from isthmus_shared.engines.vllm.turns import SAMPLING_KEY, NewRequest, Progress, TokenLine
from isthmus_shared.errors import EngineFailed, Fault, TransferFailed
from isthmus_shared.ids import Generation, Incarnation, NodeId, TransferId
from isthmus_shared.kv.manifest import KvManifest
from isthmus_shared.messages.work import FinishReason, KvTicket, RelayRef, SamplingParams, TokenLogprob

HERE = RelayRef(node_id=NodeId("here"), incarnation=Incarnation("here"), address="here")
"""The worker has opened the flow already: where it comes from is no matter of the connector."""


class Phase(StrEnum):
    LOADING = "loading"
    """Its KV or its first token has not come; unknown to vLLM."""
    WAITING = "waiting"
    """Given to vLLM, or about to be; has computed nothing yet."""
    RUNNING = "running"
    ENDING = "ending"
    """Its end is known; what it holds has not been let go yet."""


@dataclass(slots=True, eq=False)
class Live:
    name: str
    """vLLM's and the connector's; a request id may come again while its predecessor is still ending."""
    request: EngineRequest
    phase: Phase
    in_vllm: bool = False
    first_token_id: int | None = None
    source_ready: bool = False
    sink: HeldSink | None = None
    source: HeldSource | None = None
    given: int = 0
    """Output tokens reported."""
    held: list[TokenLine] = field(default_factory=list)
    """Tokens that are told only with the end."""
    cached_tokens: int = 0
    finish: FinishReason | None = None
    fault: Fault | None = None

    @property
    def next_index(self) -> int:
        return self.request.output_offset + (self.first_token_id is not None) + self.given

    @property
    def max_tokens_total(self) -> int:
        return len(self.request.token_ids) - self.request.output_offset + self.request.sampling.max_tokens

    @property
    def awaits_first_token(self) -> bool:
        return self.phase is Phase.LOADING and self.first_token_id is None and not self.request.resumes

    @property
    def can_start(self) -> bool:
        return self.phase is Phase.LOADING and self.source_ready and not self.awaits_first_token

    def end(self, finish: FinishReason, fault: Fault | None = None) -> None:
        """The first end counts."""
        if self.phase is not Phase.ENDING:
            self.phase, self.finish, self.fault = Phase.ENDING, finish, fault
            if finish in (FinishReason.CANCELLED, FinishReason.ERROR):
                self.held.clear()

    def fail(self, fault: Fault) -> None:
        """The engine is over: what has not ended ends with `fault`, a prefill whose KV is not sealed too."""
        unsealed = self.sink is not None and not self.sink.sealed and self.finish is not FinishReason.CANCELLED
        if self.phase is not Phase.ENDING or unsealed:
            self.phase, self.finish, self.fault = Phase.ENDING, FinishReason.ERROR, fault
            self.held.clear()

    def over(self) -> bool:
        """Whether nothing is held any more."""
        return self.phase is Phase.ENDING and not self.in_vllm and (self.sink is None or self.sink.ended)

    def finish_after(self, token_id: int, output_index: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        sampling = self.request.sampling
        if token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if output_index + 1 >= sampling.max_tokens else None

    # -- for vLLM

    def for_vllm(self, manifest: KvManifest, eos_token_ids: frozenset[int]) -> NewRequest:
        request, sampling = self.request, self.request.sampling
        first = () if self.first_token_id is None else (self.first_token_id,)
        stop = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_token_ids)
        left = 1 if request.kv_save is not None else sampling.max_tokens - self.next_index
        previous = request.token_ids[len(request.token_ids) - request.output_offset :] + first
        extra = self._flow(manifest) | self._sampling(sampling, previous)
        params = {
            "max_tokens": left,
            "temperature": 0.0,  # what is not greedy is chosen by `sampler`
            "ignore_eos": True,
            "stop_token_ids": sorted(stop),
            "logprobs": sampling.logprobs,
            "extra_args": extra or None,
        }
        loads, salt = request.kv_load is not None, request.cache_salt
        return NewRequest(self.name, request.token_ids + first, params, loads=loads, cache_salt=salt)

    def _flow(self, manifest: KvManifest) -> dict[str, Any]:
        if self.request.kv_save is not None:
            return {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": self.name, "generation": 1}}
        if self.request.kv_load is None:
            return {}
        ticket = KvTicket(transfer_id=TransferId(self.name), generation=Generation(1), source=HERE, manifest=manifest)
        return {"kv_transfer_params": {"do_remote_prefill": True, "ticket": ticket.model_dump(mode="json")}}

    def _sampling(self, sampling: SamplingParams, previous: tuple[int, ...]) -> dict[str, Any]:
        if sampling.temperature == 0 and sampling.presence_penalty == 0 and sampling.frequency_penalty == 0:
            return {}
        return {SAMPLING_KEY: {"params": sampling, "previous": previous, "first_index": self.next_index}}

    # -- from vLLM

    def take(self, progress: Progress, eos_token_ids: frozenset[int]) -> SequenceOutput | None:
        """What may be told at once: all but the last token, and nothing of a prefill whose KV is not sealed yet."""
        if self.phase is Phase.ENDING:
            return None
        self.phase = Phase.RUNNING
        self.cached_tokens = progress.cached_tokens
        if progress.finish in ("abort", "error"):
            self.end(FinishReason.ERROR, self._why(progress.finish))
            return None
        tokens = list(progress.tokens)
        if progress.finish is not None:
            last = tokens[-1]
            index = self.next_index + len(tokens) - 1
            finish = self.finish_after(last.token_id, index, eos_token_ids)
            self.end(finish or FinishReason.HANDOFF)
            self.held = tokens
            return None
        output = self._output(tokens)
        self.given += len(tokens)
        return output

    def last_output(self) -> SequenceOutput:
        """Its one terminal output, once it is over."""
        assert self.finish is not None
        if self.sink is not None and not self.sink.sealed and self.finish is not FinishReason.CANCELLED:
            self.held.clear()
            self.finish, self.fault = FinishReason.ERROR, self.fault or self.sink.fault or _UNSEALED
        return self._output(self.held, self.finish, self.fault)

    def _why(self, word: str) -> Fault:
        if self.sink is not None and self.sink.fault is not None:
            return self.sink.fault
        if self.source is not None:
            return TransferFailed("vLLM could not load the KV", why="see its log", todo="prefill it anew").to_fault()
        return EngineFailed(f"vLLM ended the sequence with {word!r}", why="see its log").to_fault()

    def _output(
        self, tokens: list[TokenLine], finish: FinishReason | None = None, fault: Fault | None = None
    ) -> SequenceOutput:
        wanted = self.request.sampling.logprobs
        lines = None
        if wanted is not None and tokens:
            lines = tuple(TokenLogprob(logprob=t.logprob or 0.0, top=t.top[:wanted]) for t in tokens)
        return SequenceOutput(
            request_id=self.request.request_id,
            output_index=self.next_index,
            token_ids=tuple(t.token_id for t in tokens),
            logprobs=lines,
            finish=finish,
            fault=fault,
            cached_tokens=self.cached_tokens,
        )


_UNSEALED = TransferFailed("the prompt's KV was not staged", why="vLLM's connector gave it up").to_fault()
