"""What a worker holds for whom: one record per request, from submit to its one end. Pure.

* A newer generation replaces an older one; an older or equal one is refused.
* A Cancel for a generation wins over that generation's Submit, whichever comes first.
* A record ends once: `end` gives it to the caller that frees what it names, and None to everyone after.
* A prefill that was handed over stays as STAGED until its deadline, so that a Cancel still finds the staged KV.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from isthmus_shared.engines.kv_port import KvSink, KvSource
from isthmus_shared.errors import Cancelled, NoCapacity, StaleParty
from isthmus_shared.ids import Generation, RequestId, TransferId
from isthmus_worker.work_trace import WorkTrace

MAX_REQUESTS = 4096
"""Records at once. The engine's queue is shorter; this only bounds what a flood of submits may hold meanwhile."""
MAX_STAGED = 16_384
"""Handed-over prefills that a Cancel can still find: a minute's worth at 270 a second."""
MAX_CANCELLED = 8192
"""Cancelled generations remembered, oldest forgotten first: a Submit overtaken by its Cancel is milliseconds away."""


Flow = tuple[TransferId, Generation]


class Phase(StrEnum):
    OPENING = "opening"
    """Admitted; its sink or source is being opened and the engine has not got it yet."""
    ACTIVE = "active"
    """In the engine. A decode-only sequence may still wait for its KV or its first token."""
    STREAMING = "streaming"
    """Has given output; its KV is in the engine, so the relay is not needed any more."""
    STAGED = "staged"
    """Prefilled and handed over; its KV waits in the relay."""


@dataclass(slots=True)
class Record:
    request_id: RequestId
    generation: Generation
    events_subject: str
    deadline_at_s: float | None
    """Loop time by which the transfer must be over; None when there is no transfer."""
    next_index: int = 0
    """Output index of the next token that this worker gives: what the ingress expects, in a fault too."""
    transfer_id: TransferId | None = None
    transfer_generation: Generation = field(default=Generation(0))
    """Of the flow: that of the attempt that staged it."""
    retain_until_s: float = 0.0
    """Loop time up to which its staged KV may be wanted again, if that is after its deadline."""
    is_prefill: bool = False
    phase: Phase = Phase.OPENING
    first_token_id: int | None = None
    """A StartDecode that came while its Submit was still being handled."""
    admitted_s: float = 0.0
    claimed: bool = False
    """Its flow is being fetched here, and nobody else of this worker may fetch it meanwhile."""
    sink: KvSink | None = None
    source: KvSource | None = None
    trace: WorkTrace | None = None
    """Where its request is traced."""

    @property
    def engine_id(self) -> RequestId:
        """The engine's name for this attempt: two generations never meet under one id there."""
        return RequestId(f"{self.request_id}#{self.generation}")

    @property
    def flow(self) -> Flow | None:
        """Its transfer's name at the relay."""
        return None if self.transfer_id is None else (self.transfer_id, self.transfer_generation)

    @property
    def holds_flow(self) -> bool:
        """Whether the engine may still touch its transfer's staging. (KV that was fetched is in its cache.)"""
        return self.transfer_id is not None and (self.phase is not Phase.STREAMING or self.sink is not None)

    @property
    def needs_relay(self) -> bool:
        """Whether losing the relay loses the request."""
        return self.transfer_id is not None and self.phase in (Phase.OPENING, Phase.ACTIVE)


class Requests:
    def __init__(self) -> None:
        self._records: dict[RequestId, Record] = {}
        self._by_engine_id: dict[RequestId, Record] = {}
        self._staged: OrderedDict[RequestId, Record] = OrderedDict()
        self._cancelled: OrderedDict[RequestId, Generation] = OrderedDict()
        self._deadlines: list[tuple[float, int, Record]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._records) + len(self._staged)

    @property
    def unfinished(self) -> int:
        """Records for which the engine still works (or will)."""
        return len(self._records)

    def has_unfinished(self, *, prefill: bool) -> bool:
        """Whether the engine works for a request of that side."""
        return any(record.is_prefill is prefill for record in self._records.values())

    @property
    def subjects(self) -> frozenset[str]:
        return frozenset(record.events_subject for record in self.everything())

    def admit(self, record: Record) -> Record | None:
        """Takes a new record in; returns the older generation that it replaces, which the caller must free.

        Raises `Cancelled` (its Cancel was faster), `StaleParty` (that or a newer generation is known) or `NoCapacity`.
        """
        cancelled = self._cancelled.get(record.request_id)
        if cancelled is not None and record.generation <= cancelled:
            raise Cancelled(f"request {record.request_id} was cancelled before its submit was handled")
        known = self._get(record.request_id)
        if known is not None and record.generation <= known.generation:
            raise StaleParty(
                f"request {record.request_id} generation {record.generation} is stale",
                why=f"generation {known.generation} is here already",
            )
        if record.request_id not in self._records and len(self._records) >= MAX_REQUESTS:
            raise NoCapacity(f"this worker holds {MAX_REQUESTS} requests", retry_after_s=1.0)
        if known is not None:
            self._drop(known)
        self._records[record.request_id] = record
        self._by_engine_id[record.engine_id] = record
        if record.deadline_at_s is not None:
            self._set_deadline(record, record.deadline_at_s)
        return known

    def stage(self, record: Record) -> None:
        """Its prefill was handed over: from now on only its staged KV is held.

        Beyond `MAX_STAGED` the oldest is forgotten: most are long fetched, and the relay frees the rest by itself.
        """
        assert self._records.get(record.request_id) is record
        record.phase, record.sink = Phase.STAGED, None
        if record.deadline_at_s is None or record.deadline_at_s < record.retain_until_s:
            self._set_deadline(record, record.retain_until_s)
        del self._records[record.request_id]
        del self._by_engine_id[record.engine_id]
        self._staged[record.request_id] = record
        while len(self._staged) > MAX_STAGED:
            self._staged.popitem(last=False)

    def cancel(self, request_id: RequestId, generation: Generation) -> Record | None:
        """Ends that generation and every older one, those to come included; returns the record to free, if any."""
        self._cancelled[request_id] = max(generation, self._cancelled.get(request_id, generation))
        self._cancelled.move_to_end(request_id)
        while len(self._cancelled) > MAX_CANCELLED:
            self._cancelled.popitem(last=False)
        known = self._get(request_id)
        if known is None or known.generation > generation:
            return None
        return self.end(known)

    def holds(self, record: Record) -> bool:
        """Whether this very attempt is still wanted."""
        return self._get(record.request_id) is record

    def end(self, record: Record) -> Record | None:
        """Takes the record out: the caller that gets it frees what it holds. None when it had ended before."""
        if not self.holds(record):
            return None
        self._drop(record)
        return record

    def find(self, request_id: RequestId, generation: Generation) -> Record | None:
        record = self._get(request_id)
        return record if record is not None and record.generation == generation else None

    def by_engine_id(self, engine_id: RequestId) -> Record | None:
        return self._by_engine_id.get(engine_id)

    def due(self, now_s: float) -> list[Record]:
        """Records whose deadline has passed, each told once. A sequence that streams has met its deadline."""
        late = []
        while (next_s := self.next_deadline_s()) is not None and next_s <= now_s:
            late.append(heapq.heappop(self._deadlines)[2])
        return late

    def next_deadline_s(self) -> float | None:
        """The earliest deadline that still binds."""
        while self._deadlines and not self._binds(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def needing_relay(self) -> list[Record]:
        return [record for record in self._records.values() if record.needs_relay]

    def forget_staged(self) -> None:
        """The relay is gone, and what was staged there with it."""
        self._staged.clear()

    def of_subjects(self, subjects: Iterable[str]) -> list[Record]:
        """Everything held for those ingresses."""
        wanted = set(subjects)
        return [record for record in self.everything() if record.events_subject in wanted]

    def running(self) -> list[Record]:
        """Those that the engine works for, or will."""
        return list(self._records.values())

    def everything(self) -> list[Record]:
        return [*self._records.values(), *self._staged.values()]

    def check_invariants(self) -> None:
        assert all(record.request_id == key for key, record in (*self._records.items(), *self._staged.items()))
        assert {id(r) for r in self._records.values()} == {id(r) for r in self._by_engine_id.values()}
        assert not self._records.keys() & self._staged.keys()
        assert all(record.phase is Phase.STAGED for record in self._staged.values())
        assert len(self._staged) <= MAX_STAGED
        assert len(self._cancelled) <= MAX_CANCELLED
        for request_id, generation in self._cancelled.items():
            held = self._get(request_id)
            assert held is None or held.generation > generation

    def _get(self, request_id: RequestId) -> Record | None:
        return self._records.get(request_id) or self._staged.get(request_id)

    def _set_deadline(self, record: Record, at_s: float) -> None:
        record.deadline_at_s = at_s
        self._pushed += 1
        heapq.heappush(self._deadlines, (at_s, self._pushed, record))

    def _binds(self, entry: tuple[float, int, Record]) -> bool:
        at_s, _, record = entry
        return self.holds(record) and record.phase is not Phase.STREAMING and record.deadline_at_s == at_s

    def _drop(self, record: Record) -> None:
        if self._staged.pop(record.request_id, None) is None:
            del self._records[record.request_id]
            del self._by_engine_id[record.engine_id]
