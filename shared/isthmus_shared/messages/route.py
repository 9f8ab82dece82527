"""Routing: what the ingress asks of the planner."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from isthmus_shared.errors import Fault
from isthmus_shared.ids import Incarnation, RequestId
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.work import Part, RelayRef, WorkerRef


class Mode(StrEnum):
    DISAGGREGATED = "disaggregated"
    AGGREGATED = "aggregated"


PREFIX_BLOCK_TOKENS = 64
"""Tokens behind one hash of a prefix: a multiple of most KV block sizes, and worth a hash each."""
MAX_PREFIX_HASHES = 2048
"""131,072 tokens; what follows counts as not cached."""
PREFIX_HASH_BYTES = 8

PrefixHash = Annotated[bytes, Field(min_length=PREFIX_HASH_BYTES, max_length=PREFIX_HASH_BYTES)]
"""Of a whole prefix that ends with this block: chained, and keyed by the tenant's cache salt."""


class Slo(Part):
    """What a request was promised. None: no such target."""

    name: str = Field(default="", max_length=64)
    """Of its class."""
    ttft_s: float | None = Field(default=None, gt=0)
    itl_s: float | None = Field(default=None, gt=0)
    """Mean over the answer."""
    priority: int = Field(default=0, ge=-100, le=100)
    """Higher goes first."""


class StagedKv(Part):
    """KV that waits, sealed, in some relay's staging."""

    relay: RelayRef
    tokens: int = Field(gt=0)
    """The first ones of the request's; a decode worker computes the rest."""
    model_fingerprint: str
    kv_form: str
    """As in WorkerHeartbeat: who fetches it must have the same."""


class RouteRequest(WireMessage):
    KIND: ClassVar[str] = "route_request"

    request_id: RequestId
    model: str
    isl_tokens: int = Field(gt=0)
    max_osl_tokens: int = Field(gt=0)
    exclude: tuple[Incarnation, ...] = Field(default=(), max_length=64)
    """Lives of workers that have just failed this request."""
    slo: Slo | None = None
    tenant: str = Field(default="", max_length=64)
    """Whose request it is: the line is fair between tenants."""
    prefix: tuple[PrefixHash, ...] = Field(default=(), max_length=MAX_PREFIX_HASHES)
    """Of the prompt's whole blocks of `PREFIX_BLOCK_TOKENS`, from its start."""
    waited_s: float = Field(default=0.0, ge=0)
    """In line so far, over all asks."""
    patience_s: float = Field(default=0.0, ge=0, le=60)
    """How long the planner may hold this ask; 0: answer at once."""
    staged: StagedKv | None = None
    """Its KV is there already: wanted is a decode worker that can fetch it, and no prefill. Where there is none, the
    answer is as if this were not set."""


class Deadlines(Part):
    """Bounds that the ingress enforces, seconds."""

    ttft_s: float = Field(gt=0)
    """From submit to the first token."""
    transfer_s: float = Field(gt=0)
    """From submit to committed KV on the decode side."""
    stall_s: float = Field(gt=0)
    """Longest silence between two tokens of one stream."""


class Prediction(Part):
    ttft_p50_s: float = Field(ge=0)
    ttft_p90_s: float = Field(ge=0)
    itl_p50_s: float = Field(ge=0)
    itl_p90_s: float = Field(ge=0)
    calibrated: bool
    """False until the constants come from what these workers reported."""
    cached_tokens: int = Field(default=0, ge=0)
    """Of the prompt, already in the prefill worker's cache."""
    transfer_s: float | None = Field(default=None, ge=0)
    """The crossing, under the present pace; None when aggregated."""


class Route(Part):
    mode: Mode
    prefill: WorkerRef | None = None
    """None when aggregated; disaggregated without one: `decode` fetches the KV that the request said is staged."""
    decode: WorkerRef
    deadlines: Deadlines
    predicted: Prediction
    planner: Incarnation


class Queued(Part):
    """Still in line: ask again at once."""

    position: int = Field(ge=0)
    """Requests before it, in this replica's line."""
    wait_s: float = Field(ge=0)
    """Predicted from here."""


class RouteReply(WireMessage):
    KIND: ClassVar[str] = "route_reply"

    route: Route | None = None
    fault: Fault | None = None
    queued: Queued | None = None
    """Neither of the two yet."""


class PlannedPair(Part):
    prefill: WorkerRef | None = None
    """None: aggregated on `decode`."""
    decode: WorkerRef
    weight: float = Field(gt=0)
    """Its share of the model's requests, relative to the others'."""
    max_context_tokens: int = Field(gt=0)
    deadlines: Deadlines
    predicted: Prediction


class ModelPlan(Part):
    model: str
    pairs: tuple[PlannedPair, ...] = Field(default=(), max_length=256)


class RoutePlan(WireMessage):
    """What an ingress routes by while no planner answers. Each replaces the one before as a whole."""

    KIND: ClassVar[str] = "route_plan"

    planner: Incarnation
    valid_s: float = Field(gt=0, le=3600)
    models: tuple[ModelPlan, ...] = ()
