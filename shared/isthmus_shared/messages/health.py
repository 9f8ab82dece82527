"""Heartbeats and the view of the cluster. A process that misses `LOST_AFTER_BEATS` beats is taken for dead."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from isthmus_shared.ids import Incarnation, IngressId, NodeId, WorkerId
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.work import Part, RelayRef, WorkerRef

HEARTBEAT_INTERVAL_S = 0.5
"""Default; twice a second costs a process under 0.1 % of a core and finds a silent death in LOST_AFTER_BEATS beats."""
LOST_AFTER_BEATS = 4


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class ProcessState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


MAX_STEP_SAMPLES = 8
"""In one beat: sixteen steps a second are plenty to learn from, in half a kilobyte."""


class StepSample(Part):
    """One step of an engine."""

    step_s: float = Field(gt=0)
    decode_sequences: int = Field(ge=0)
    prefill_tokens: int = Field(ge=0)
    kv_tokens: int = Field(ge=0)
    """In the cache when it ended, rounded up to blocks."""


class WorkerLoad(Part):
    running: int = 0
    waiting: int = 0
    loading: int = 0
    queued_prefill_tokens: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    decode_step_s: float | None = None
    prefill_tokens_per_s: float | None = None
    steps_total: int = Field(default=0, ge=0)
    """Steps since the start, so that a reader knows how many samples the last beat did not have."""
    steps: tuple[StepSample, ...] = Field(default=(), max_length=MAX_STEP_SAMPLES)
    """The latest, oldest first."""


class _Heartbeat(WireMessage):
    incarnation: Incarnation
    state: ProcessState
    interval_s: float = Field(gt=0)
    """The sender's own interval, so that a receiver knows when to worry."""
    http_address: str | None = None
    """host:port of /health, /live, /ready, /metrics."""


class WorkerHeartbeat(_Heartbeat):
    KIND: ClassVar[str] = "worker_heartbeat"

    worker_id: WorkerId
    node_id: NodeId
    roles: tuple[Role, ...]
    vendor: str
    """A label for people (`nvidia`, `amd`, `cpu`); nothing is decided by it."""
    engine: str
    model: str
    model_fingerprint: str
    kv_form: str
    """Canonical form that its manifests use: dtype and groups (`kv.manifest`); must be equal to exchange KV."""
    kv_layout: str
    max_model_len_tokens: int
    kv_block_tokens: int
    relay: RelayRef | None = None
    """None while it has no relay: then it can only serve aggregated."""
    load: WorkerLoad
    roles_able: tuple[Role, ...] = ()
    """Those that it could be assigned; empty: only the ones it has."""
    models_able: tuple[str, ...] = Field(default=(), max_length=64)
    """Those that it could load; empty: only the one it has."""
    epoch: int = Field(default=0, ge=0)
    """Of the last assignment that it took; 0: none."""
    max_batch: int = Field(default=0, ge=0)
    """Sequences in one of its steps, at most; 0: it does not say."""
    prefix_sequence: int = Field(default=0, ge=0)
    """Of the last prefix event that it has published; a planner that has another one asks for a snapshot."""


class RelayHeartbeat(_Heartbeat):
    KIND: ClassVar[str] = "relay_heartbeat"

    relay: RelayRef
    pool_bytes: int
    pool_free_bytes: int
    flows_out: int
    flows_in: int
    credits_outstanding_bytes: int
    slots_quarantined: int
    sent_bytes: int
    received_bytes: int
    host_s_per_byte: float | None = Field(default=None, gt=0)
    """CPU time of this relay for each byte received, measured; None until enough has come."""
    clients: tuple[WorkerRef, ...] = ()


class LaneRate(Part):
    """Ceiling for what one relay's life sends to another's."""

    sender: Incarnation
    receiver: Incarnation
    bytes_per_s: float = Field(gt=0)


class RelayRates(WireMessage):
    """The planner's ceilings. Each message replaces the one before as a whole; a relay's own setting still holds."""

    KIND: ClassVar[str] = "relay_rates"

    lanes: tuple[LaneRate, ...] = ()
    default_bytes_per_s: float | None = Field(default=None, gt=0)
    """For lanes that are not named; None: only the relay's own setting."""
    epoch: int = Field(default=0, ge=0)
    """Of the leader that says so; lower than one seen: ignored. 0: an operator's."""
    valid_s: float = Field(gt=0, le=3600)
    """After so long without another, the relay's own setting holds again: the planner may die."""


class Foreseen(Part):
    """A latency of an ingress' latest requests, beside what the planner predicted when it routed them: medians."""

    requests: int
    actual_p50_s: float = Field(ge=0)
    predicted_p50_s: float = Field(ge=0)
    error: float = Field(ge=0)
    """Of |predicted / actual - 1|, request by request."""


class IngressHeartbeat(_Heartbeat):
    KIND: ClassVar[str] = "ingress_heartbeat"

    ingress_id: IngressId
    events_subject: str
    requests_in_flight: int
    ttft: Foreseen | None = None
    """From receipt to the first token. None until a request had one."""
    itl: Foreseen | None = None
    """Mean over an answer's tokens. None until an answer of more than one token has ended."""


class PlannerHeartbeat(_Heartbeat):
    KIND: ClassVar[str] = "planner_heartbeat"

    leader: bool = False
    epoch: int = Field(default=0, ge=0)
    """Of its leadership; 0: it does not lead."""
    leader_problem: str = Field(default="", max_length=512)
    """Why it can't even try to; empty if it can."""
    routes_total: int = Field(default=0, ge=0)


LEFT = "draining"
"""A WorkerLost's `why` when the worker itself says goodbye: all that it had to say was said before."""


class WorkerLost(WireMessage):
    KIND: ClassVar[str] = "worker_lost"

    worker: WorkerRef
    why: str
    silent: bool = False
    """Nobody saw it end: the sender has not heard it for too long. Others may hear it, or hear it again."""


class WorkerForecast(Part):
    """What a planner predicted of a worker beside what happened, and whether its steps have become slower."""

    worker_id: WorkerId
    incarnation: Incarnation
    drifting: bool = False
    slowdown: float = Field(default=1.0, gt=0)
    """Time of its steps over what they usually take."""
    ttft: Foreseen | None = None
    """Of requests that it prefilled, from their route on. None until one had a first token."""
    itl: Foreseen | None = None
    """Of those that it decoded."""


class ViewRequest(WireMessage):
    KIND: ClassVar[str] = "view_request"


class ClusterView(WireMessage):
    """What the planner knows, for `isthmus status` and `/v1/models`."""

    KIND: ClassVar[str] = "cluster_view"

    planner: Incarnation
    workers: tuple[WorkerHeartbeat, ...] = ()
    relays: tuple[RelayHeartbeat, ...] = ()
    ingresses: tuple[IngressHeartbeat, ...] = ()
    planners: tuple[PlannerHeartbeat, ...] = ()
    forecasts: tuple[WorkerForecast, ...] = ()
    """Of the planner that answers."""
