"""`kv_connector_extra_config`: the connector's settings, validated when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isthmus_kvrelay.client.vllm.params import MAX_DEADLINE_S, MAX_TP
from isthmus_shared.errors import ConfigInvalid


class ConnectorSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    relay_socket: str | None = Field(
        default=None, min_length=1, description="Unix socket of this node's relay (ISTHMUS_RELAY_SOCKET)"
    )
    worker_flows: bool = Field(
        default=False, description="Instead: the Isthmus worker around this engine opens all flows (`use_flows`)"
    )
    node_id: str = Field(default="vllm", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="The relay's node")
    worker_id: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.-]{1,80}$",
        description="How the relay's log calls this engine; its ranks are -r0, -r1, …; default: from vLLM's engine id",
    )
    model_fingerprint: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="Known sha256 of the model; default: read from its files, which takes seconds per 10 GB",
    )
    peer_tp_size: int | None = Field(
        default=None, gt=0, le=MAX_TP, description="Ranks of the engines that decode for this one; default: its own"
    )
    deadline_s: float = Field(
        default=120, gt=0, le=MAX_DEADLINE_S, description="From a prefill's first step to the end of its transfer"
    )
    staging_wait_s: float = Field(
        default=30, ge=0, le=MAX_DEADLINE_S, description="For staging to become free before a transfer is given up"
    )
    appear_s: float = Field(
        default=10, ge=0, le=MAX_DEADLINE_S, description="For a transfer that is asked for before it has begun"
    )
    attach_s: float = Field(
        default=10, ge=0, le=600, description="For the relay to be there when the engine starts; then it goes on alone"
    )

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Raises `ConfigInvalid` that names the field."""
        try:
            settings = cls.model_validate(dict(extra))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ConfigInvalid(
                f"kv_connector_extra_config.{field}: {first['msg']}",
                todo=f"the fields are {', '.join(cls.model_fields)} (docs/vllm.md)",
                param=field,
            ) from error
        if (settings.relay_socket is None) != settings.worker_flows:
            raise ConfigInvalid(
                "kv_connector_extra_config.relay_socket: the path of this node's relay is needed",
                todo="give ISTHMUS_RELAY_SOCKET's (docs/vllm.md)",
                param="relay_socket",
            )
        return settings
