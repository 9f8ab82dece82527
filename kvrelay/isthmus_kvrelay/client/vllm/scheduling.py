"""What the scheduler's connector decides: who saves, who loads, who is held, what is let go. Pure.

Calls come in vLLM's order: for each waiting request `matched` (any number of times), `allocated` (once or twice); then
one `step`; later `finished`, and `sent` or `received` when the workers have said so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus_kvrelay.client.vllm.jobs import (
    NULL_BLOCK,
    Blocks,
    Discard,
    FlowName,
    LoadJob,
    Origin,
    SaveJob,
    StepJobs,
)
from isthmus_kvrelay.client.vllm.params import DecodeParams, PrefillParams
from isthmus_shared.errors import ManifestMismatch
from isthmus_shared.ids import Generation, TransferId
from isthmus_shared.kv.negotiate import require_exchangeable
from isthmus_shared.kv.shape import KvShape
from isthmus_shared.messages.work import KvTicket, RelayRef


@dataclass(frozen=True, slots=True)
class GroupTable:
    """One of vLLM's cache groups: tokens of a block, and the window if its layers have one."""

    block_tokens: int
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SchedulingSettings:
    shape: KvShape
    groups: tuple[GroupTable, ...]
    tp_size: int
    peer_tp_size: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request in a step: tokens in the cache before it, tokens computed by it."""

    computed: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """`held`: the blocks stay until the workers have said that they are done. `params`: for whoever decodes."""

    held: bool = False
    params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    jobs: StepJobs
    pins: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Blocks to be kept for those requests until `sent`."""


@dataclass(slots=True)
class _Save:
    flow: FlowName
    deadline_s: float
    saved: int = 0
    begun: bool = False
    pinned: bool = False


@dataclass(slots=True)
class _Load:
    params: DecodeParams
    flow: FlowName
    refusal: str | None
    tokens: int
    """To be had: never more than the prompt's, whatever the ticket says."""
    local: int = 0
    """Tokens that the engine had itself when it last asked."""
    used: bool = False
    loading: bool = False

    @property
    def origin(self) -> Origin:
        source = self.params.ticket.source
        return Origin(source.node_id, source.incarnation, source.address, self.params.ticket.pull)


class Scheduling:
    def __init__(self, settings: SchedulingSettings) -> None:
        self._settings = settings
        self._saves: dict[str, _Save] = {}
        self._loads: dict[str, _Load] = {}
        self._sending: set[str] = set()
        """Finished and held."""
        self._receiving: set[str] = set()
        """Ended while they loaded."""
        self._new_loads: list[LoadJob] = []
        self._dropped: set[str] = set()
        self._cancelled: set[str] = set()
        self._discarded: list[Discard] = []

    # --- requests

    def knows(self, request_id: str) -> bool:
        return request_id in self._saves or request_id in self._loads

    def begin(
        self, request_id: str, prompt_tokens: int, params: PrefillParams | DecodeParams, *, transfer_id: str
    ) -> None:
        """`transfer_id` is used if the parameters name none."""
        own, peer = self._settings.tp_size, self._settings.peer_tp_size
        deadline_s = params.deadline_s or self._settings.deadline_s
        if isinstance(params, PrefillParams):
            flow = FlowName(
                params.transfer_id or transfer_id, params.generation, prompt_tokens, own, params.decode_tp_size or peer
            )
            self._saves[request_id] = _Save(flow, deadline_s)
        else:
            ticket = params.ticket
            flow = FlowName(
                ticket.transfer_id, ticket.generation, ticket.manifest.prompt_tokens, params.prefill_tp_size, own
            )
            tokens = min(prompt_tokens, flow.prompt_tokens)
            self._loads[request_id] = _Load(params, flow, self._refusal(ticket, prompt_tokens), tokens)

    def _refusal(self, ticket: KvTicket, prompt_tokens: int) -> str | None:
        tokens = ticket.manifest.prompt_tokens
        if tokens > prompt_tokens:
            return f"the ticket is for a prompt of {tokens} tokens, this one has {prompt_tokens}"
        try:
            require_exchangeable(self._settings.shape.manifest(tokens), ticket.manifest)
        except ManifestMismatch as error:
            return error.text
        return None

    def matched(self, request_id: str, computed: int) -> int:
        """Tokens beyond the `computed` first ones that will be loaded (asynchronously)."""
        load = self._loads.get(request_id)
        if load is None or load.used:
            return 0
        load.local = computed
        return max(0, load.tokens - computed)

    def allocated(self, request_id: str, blocks: Blocks, external_tokens: int) -> None:
        load = self._loads.get(request_id)
        if load is None or load.used or external_tokens <= 0:
            return
        load.used = load.loading = True
        self._new_loads.append(
            LoadJob(
                request_id=request_id,
                flow=load.flow,
                origin=load.origin,
                blocks=blocks,
                start=load.local,
                end=load.local + external_tokens,
                deadline_s=load.params.deadline_s or self._settings.deadline_s,
                refusal=load.refusal,
            )
        )

    # --- steps

    @property
    def busy(self) -> bool:
        """Whether transfers are under way."""
        return bool(self._saves or self._sending or self._receiving) or any(
            load.loading for load in self._loads.values()
        )

    @property
    def saving(self) -> Iterable[str]:
        """Requests whose KV is being saved, step by step."""
        return (request_id for request_id, save in self._saves.items() if save.begun)

    def step(
        self, scheduled: Mapping[str, Scheduled], tables: Callable[[str], Blocks], preempted: Iterable[str]
    ) -> Plan:
        """`preempted`: those that have lost their blocks since the last step."""
        lost = frozenset(one for one in preempted if one in self._saves and self._saves[one].begun)
        for request_id in lost:
            self._saves[request_id].saved, self._saves[request_id].pinned = 0, False
        saves, pins = [], {}
        for request_id, work in scheduled.items() if self._saves else ():
            save = self._saves.get(request_id)
            if save is None:
                continue
            end = min(work.computed + work.tokens, save.flow.prompt_tokens)
            if end <= save.saved:
                continue
            blocks = tables(request_id)
            save.saved, save.begun = end, True
            saves.append(SaveJob(request_id, save.flow, blocks, end, save.deadline_s))
            if end == save.flow.prompt_tokens and not save.pinned:
                save.pinned = True
                pins[request_id] = self._window_blocks(blocks, end)
        jobs = StepJobs(
            fingerprint=self._settings.shape.model_fingerprint,
            saves=tuple(saves),
            loads=tuple(self._new_loads),
            preempted=lost,
            dropped=frozenset(self._dropped),
            cancelled=frozenset(self._cancelled),
            discarded=tuple(self._discarded),
        )
        self._new_loads, self._dropped, self._cancelled, self._discarded = [], set(), set(), []
        return Plan(jobs, {request_id: blocks for request_id, blocks in pins.items() if blocks})

    def _window_blocks(self, blocks: Blocks, prompt_tokens: int) -> tuple[int, ...]:
        """Of the groups with a window: the blocks whose tokens the flow carries."""
        found: list[int] = []
        for group, table in zip(self._settings.groups, blocks, strict=True):
            if group.window_tokens is not None:
                first = max(0, prompt_tokens - group.window_tokens) // group.block_tokens
                found += [block for block in table[first:] if block != NULL_BLOCK]
        return tuple(found)

    # --- ends

    def finished(self, request_id: str, *, aborted: bool, relay: RelayRef | None) -> Finished:
        """The request is over for the engine. Called once; unknown ones are nobody's."""
        save, load = self._saves.pop(request_id, None), self._loads.pop(request_id, None)
        if load is not None:
            self._end_load(request_id, load)
        if save is None or not save.begun:
            return Finished()
        self._sending.add(request_id)
        if aborted or save.saved < save.flow.prompt_tokens or relay is None:
            self._dropped.add(request_id)
            return Finished(held=True)
        return Finished(held=True, params=self._ticket(save, relay).wire())

    def _end_load(self, request_id: str, load: _Load) -> None:
        if load.loading:
            self._cancelled.add(request_id)
            self._receiving.add(request_id)
        elif not load.used and load.refusal is None:
            self._discarded.append(Discard(load.flow, load.origin))

    def _ticket(self, save: _Save, relay: RelayRef) -> DecodeParams:
        ticket = KvTicket(
            transfer_id=TransferId(save.flow.transfer_id),
            generation=Generation(save.flow.generation),
            source=relay,
            manifest=self._settings.shape.manifest(save.flow.prompt_tokens),
        )
        return DecodeParams(do_remote_prefill=True, ticket=ticket, prefill_tp_size=self._settings.tp_size)

    def sent(self, request_id: str) -> None:
        self._sending.discard(request_id)

    def received(self, request_id: str) -> None:
        """Loaded, failed or cancelled: the workers write to its blocks no more."""
        self._receiving.discard(request_id)
        if request_id in self._loads:
            self._loads[request_id].loading = False

    def check_invariants(self) -> None:
        assert not self._sending & self._saves.keys(), "held while it still runs"
        assert not self._receiving & self._loads.keys(), "ended while it still loads"
        for load in self._loads.values():
            assert load.used or not load.loading, "it loads without having been allocated"
        for save in self._saves.values():
            assert 0 <= save.saved <= save.flow.prompt_tokens, "saved beyond the prompt"
