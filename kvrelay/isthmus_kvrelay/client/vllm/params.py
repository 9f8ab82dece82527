"""`kv_transfer_params`, as proxies pass them: what a request asks of the connector. Validated here, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isthmus_shared.errors import InvalidRequest
from isthmus_shared.messages.work import KvTicket

MAX_TP = 1024
MAX_DEADLINE_S = 86_400.0


class _Params(BaseModel):
    """Unknown keys are other connectors': proxies send theirs along."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    deadline_s: float | None = Field(default=None, gt=0, le=MAX_DEADLINE_S)
    """From now to the end of the transfer; None: the connector's `deadline_s`."""


class PrefillParams(_Params):
    """Stage this request's KV for another engine."""

    do_remote_decode: Literal[True]
    transfer_id: str | None = Field(default=None, min_length=1, max_length=100)
    """None: the connector makes one."""
    generation: int = Field(default=1, gt=0, lt=2**32)
    decode_tp_size: int | None = Field(default=None, gt=0, le=MAX_TP)
    """Tensor-parallel ranks of the engine that will decode; None: the connector's `peer_tp_size`."""


class DecodeParams(_Params):
    """Load this request's KV instead of computing it."""

    do_remote_prefill: Literal[True]
    ticket: KvTicket
    prefill_tp_size: int = Field(default=1, gt=0, le=MAX_TP)

    def wire(self) -> dict[str, Any]:
        """What the prefill engine's answer carries, and the proxy passes on: JSON values."""
        return {"do_remote_decode": False, **self.model_dump(mode="json", exclude_none=True)}


def parse_params(params: Mapping[str, Any] | None) -> PrefillParams | DecodeParams | None:
    """None when nothing is asked of the connector. Raises `InvalidRequest` that names the field."""
    if not params:
        return None
    wants_decode, wants_prefill = bool(params.get("do_remote_decode")), bool(params.get("do_remote_prefill"))
    if wants_decode and wants_prefill:
        raise InvalidRequest(
            "kv_transfer_params: do_remote_decode and do_remote_prefill are both set",
            why="an engine either prefills for another or decodes what another has prefilled",
            param="kv_transfer_params",
        )
    if not wants_decode and not wants_prefill:
        return None
    try:
        if wants_decode:
            return PrefillParams.model_validate(params)
        return DecodeParams.model_validate(params)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(
            f"kv_transfer_params.{field}: {first['msg']}",
            todo="pass on the kv_transfer_params of the prefill engine's answer unchanged",
            param=field,
        ) from error
