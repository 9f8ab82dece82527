"""Routing: what the ingress asks of the planner."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from isthmus_shared.errors import Fault
from isthmus_shared.ids import Incarnation, RequestId
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.work import Part, WorkerRef


class Mode(StrEnum):
    DISAGGREGATED = "disaggregated"
    AGGREGATED = "aggregated"


class RouteRequest(WireMessage):
    KIND: ClassVar[str] = "route_request"

    request_id: RequestId
    model: str
    isl_tokens: int = Field(gt=0)
    max_osl_tokens: int = Field(gt=0)
    exclude: tuple[Incarnation, ...] = Field(default=(), max_length=64)
    """Lives of workers that have just failed this request."""


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


class Route(Part):
    mode: Mode
    prefill: WorkerRef | None = None
    """None when aggregated."""
    decode: WorkerRef
    deadlines: Deadlines
    predicted: Prediction
    planner: Incarnation


class RouteReply(WireMessage):
    KIND: ClassVar[str] = "route_reply"

    route: Route | None = None
    fault: Fault | None = None
