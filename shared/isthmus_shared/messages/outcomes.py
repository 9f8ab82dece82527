"""What became of requests, for those who predicted it; and the explanation of one route."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from isthmus_shared.ids import Incarnation, IngressId, RequestId
from isthmus_shared.messages.base import WireMessage
from isthmus_shared.messages.route import Mode, Prediction
from isthmus_shared.messages.work import Part, WorkerRef

MAX_OUTCOMES = 1024
"""In one message: half a second at 2,000 requests per second, in some 300 kB."""
MAX_CANDIDATES = 64
"""Told of one route: the best ones; the rest are counted."""


class Outcome(Part):
    """One request that has ended, as its client saw it."""

    request_id: RequestId
    model: str
    tenant: str = Field(default="", max_length=64)
    slo_class: str = Field(default="", max_length=64)
    mode: Mode | None = None
    """Of its last attempt; None: it never had a route."""
    prefill: WorkerRef | None = None
    decode: WorkerRef | None = None
    isl_tokens: int = Field(ge=0)
    osl_tokens: int = Field(ge=0)
    cached_tokens: int = Field(default=0, ge=0)
    queued_s: float = Field(default=0.0, ge=0)
    """Waited for a route."""
    ttft_s: float | None = Field(default=None, ge=0)
    """From the first ask for a route; None: no token came."""
    itl_s: float | None = Field(default=None, ge=0)
    """Mean over the answer; None below two tokens."""
    e2el_s: float = Field(ge=0)
    predicted: Prediction | None = None
    """Of the last attempt's route."""
    attempts: int = Field(default=1, ge=0)
    finish: str = ""
    """The finish reason, or the error's code."""


class Outcomes(WireMessage):
    KIND: ClassVar[str] = "outcomes"

    ingress_id: IngressId
    ingress: Incarnation
    outcomes: tuple[Outcome, ...] = Field(min_length=1, max_length=MAX_OUTCOMES)


class Candidate(Part):
    """One plan that was weighed, or (with `refused`) one that was not."""

    mode: Mode
    prefill: WorkerRef | None = None
    decode: WorkerRef
    predicted: Prediction | None = None
    scores: dict[str, float] = Field(default_factory=dict)
    """Seconds, by scorer; their sum is what the picker compares."""
    refused: str | None = None
    """The filter that took it out, in words."""


class Explanation(Part):
    request_id: RequestId
    planner: Incarnation
    age_s: float = Field(ge=0)
    """Since the choice."""
    isl_tokens: int
    max_osl_tokens: int
    tenant: str = ""
    slo_class: str = ""
    waited_s: float = 0.0
    chosen: Candidate | None = None
    """None: refused."""
    candidates: tuple[Candidate, ...] = Field(default=(), max_length=MAX_CANDIDATES)
    """Best first, the chosen one among them."""
    not_shown: int = 0
    refusals: dict[str, int] = Field(default_factory=dict)
    """Workers and pairs that a filter took out, by reason."""
    why: str = ""
    """The decisive difference, or the refusal's text."""
    outcome: Outcome | None = None
    """Once the ingress has told."""


class ExplainRequest(WireMessage):
    KIND: ClassVar[str] = "explain_request"

    request_id: RequestId


class ExplainReply(WireMessage):
    """One for each time the request was routed (a re-plan asks again), latest last."""

    KIND: ClassVar[str] = "explain_reply"

    explanations: tuple[Explanation, ...] = ()
