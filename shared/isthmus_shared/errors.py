"""Every way in which Isthmus refuses or fails.

    IsthmusError
    ├── InvalidRequest        the caller's fault: 4xx, names the field
    │   ├── ModelNotFound
    │   ├── ContextTooLong
    │   ├── PayloadTooLarge
    │   └── ConfigInvalid     an operator's setting, found at start
    ├── Unavailable           nobody can serve it now: 503/429 with a Retry-After
    │   ├── NoResponders      nothing listens on that subject
    │   ├── NoCapacity        everybody who could is full
    │   ├── Draining          that process is going away
    │   └── BusDisconnected   the bus is out of reach
    ├── DeadlineExceeded      a named wait ran out: 504
    ├── PartyLost             a worker, relay or peer died while it held the request
    ├── TransferFailed        KV did not arrive whole, or not in time
    │   ├── ChecksumMismatch
    │   └── StagingFull
    ├── StaleParty            an old incarnation or generation was named
    ├── BusForbidden          the bus does not let this user say or hear that
    ├── ManifestMismatch      two sides cannot exchange this KV: names the field and both values
    ├── ProtocolViolation     a peer's bytes make no sense; the peer is closed
    ├── EngineFailed          the engine raised
    └── Cancelled             the client or the ingress asked for the end

An error has a stable `code`, a retry verdict and a text that says what happened, why, and what to do. On the wire
it is a `Fault`; `Fault.to_error()` and `IsthmusError.to_fault()` are inverse.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field


class Retry(StrEnum):
    """What the holder of a failed request may do with it."""

    NEVER = "never"
    """The same request fails again anywhere."""
    LATER = "later"
    """The same party may be asked again after `retry_after_s`."""
    ELSEWHERE = "elsewhere"
    """Re-plan at once, leaving the failed party out."""


class Fault(BaseModel):
    """An error on the wire."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    what: str
    why: str = ""
    todo: str = ""
    param: str | None = None
    retry_after_s: float | None = Field(default=None, ge=0)

    def to_error(self) -> IsthmusError:
        """The typed error that this fault came from; an unknown code becomes `EngineFailed` (never retried blindly)."""
        cls = _BY_CODE.get(self.code, EngineFailed)
        return cls(self.what, why=self.why, todo=self.todo, param=self.param, retry_after_s=self.retry_after_s)


class IsthmusError(Exception):
    """Base of all. Class attributes give the verdicts; instance attributes the facts."""

    code: ClassVar[str] = "internal_error"
    retry: ClassVar[Retry] = Retry.NEVER
    http_status: ClassVar[int] = 500

    def __init__(
        self, what: str, *, why: str = "", todo: str = "", param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        self.what, self.why, self.todo, self.param, self.retry_after_s = what, why, todo, param, retry_after_s
        super().__init__(self.text)

    @property
    def text(self) -> str:
        """``what: why; todo``, without the parts that are empty."""
        text = f"{self.what}: {self.why}" if self.why else self.what
        return f"{text}; {self.todo}" if self.todo else text

    def to_fault(self) -> Fault:
        return Fault(
            code=self.code,
            what=self.what,
            why=self.why,
            todo=self.todo,
            param=self.param,
            retry_after_s=self.retry_after_s,
        )


class InvalidRequest(IsthmusError):
    code, http_status = "invalid_request", 400


class ModelNotFound(InvalidRequest):
    code, http_status = "model_not_found", 404


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class PayloadTooLarge(InvalidRequest):
    code, http_status = "payload_too_large", 413


class ConfigInvalid(InvalidRequest):
    code = "config_invalid"


class Unavailable(IsthmusError):
    code, http_status, retry = "unavailable", 503, Retry.LATER


class NoResponders(Unavailable):
    code, retry = "no_responders", Retry.ELSEWHERE


class NoCapacity(Unavailable):
    code, http_status, retry = "no_capacity", 429, Retry.ELSEWHERE


class SloUnattainable(NoCapacity):
    """Its targets cannot be met now. Its client decides whether later, or with other targets."""

    code, retry = "slo_unattainable", Retry.NEVER


class Draining(Unavailable):
    code, retry = "draining", Retry.ELSEWHERE


class BusDisconnected(Unavailable):
    code = "bus_disconnected"


class DeadlineExceeded(IsthmusError):
    code, http_status, retry = "deadline_exceeded", 504, Retry.ELSEWHERE


class PartyLost(IsthmusError):
    code, http_status, retry = "party_lost", 503, Retry.ELSEWHERE


class TransferFailed(IsthmusError):
    code, http_status, retry = "transfer_failed", 503, Retry.ELSEWHERE


class ChecksumMismatch(TransferFailed):
    code = "checksum_mismatch"


class StagingFull(TransferFailed):
    code = "staging_full"


class StaleParty(IsthmusError):
    code, http_status, retry = "stale_party", 503, Retry.ELSEWHERE


class BusForbidden(IsthmusError):
    code = "bus_forbidden"


class ManifestMismatch(IsthmusError):
    code, http_status, retry = "manifest_mismatch", 503, Retry.ELSEWHERE


class ProtocolViolation(IsthmusError):
    code, http_status = "protocol_violation", 502


class EngineFailed(IsthmusError):
    code, http_status, retry = "engine_failed", 500, Retry.ELSEWHERE


class Cancelled(IsthmusError):
    code, http_status = "cancelled", 499


def _walk(cls: type[IsthmusError]) -> dict[str, type[IsthmusError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found |= _walk(sub)
    return found


_BY_CODE = _walk(IsthmusError)
