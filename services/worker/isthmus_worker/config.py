"""A worker's settings: ``ISTHMUS_ENGINE_*`` says what computes, ``ISTHMUS_WORKER_*`` where it stands."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from isthmus_shared.config import ServiceConfig
from isthmus_shared.engines.config import EngineConfig, EngineKind, SimConfig, SimCosts
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.ids import NodeId, WorkerId
from isthmus_shared.kv.profiles import PROFILES
from isthmus_shared.messages.health import Role
from isthmus_shared.models import parse_model_folders

_NAME = r"^[A-Za-z0-9_-]{1,64}$"
"""Becomes a token of bus subjects."""
_COSTS = SimCosts()
_ENGINE = EngineConfig.model_fields


class EngineSettings(ServiceConfig):
    PREFIX: ClassVar[str] = "ENGINE"

    kind: EngineKind = Field(default=EngineKind.REFERENCE, description="What computes tokens")
    model: Path | None = Field(
        default=None,
        description="Folder with config.json and *.safetensors (reference, vllm), or a Hugging Face name (vllm)",
    )
    model_name: str = Field(default="isthmus-demo", min_length=1, max_length=200, description="Its name for clients")
    max_model_len: int | None = Field(default=None, gt=1, description="Longest sequence, tokens; empty: the model's")
    kv_layout: str = Field(
        default="nhd:16:fp32",
        description=f"order:block tokens:dtype[:packed<x>], or a vendor's: {', '.join(PROFILES)}",
    )
    kv_blocks: int | None = Field(default=None, gt=0, description="KV cache in blocks; empty: from kv_cache_bytes")
    kv_cache_bytes: int = Field(default=_ENGINE["kv_cache_bytes"].default, gt=0, description="KV cache in bytes")
    max_batch: int = Field(default=_ENGINE["max_batch"].default, gt=0, description="Sequences in one step")
    max_waiting: int = Field(default=_ENGINE["max_waiting"].default, gt=0, description="Requests queued, at most")
    prefill_chunk_tokens: int = Field(
        default=_ENGINE["prefill_chunk_tokens"].default, gt=0, description="Prompt tokens in one step"
    )
    prefix_cache: bool = Field(
        default=True, description="Keep KV blocks for later prompts with the same beginning (docs/prefix-cache.md)"
    )
    device: str = Field(
        default="cpu",
        pattern=r"^[a-z]+(:[0-9]+)?$",
        description="torch's name of where it computes (reference): cuda, cuda:1",
    )
    threads: int = Field(default=1, gt=0, description="CPU threads of the engine")
    vllm_args: str = Field(
        default="", description='vllm: its engine\'s arguments, as JSON or as "--max-num-seqs 64 --dtype bfloat16"'
    )
    sim_prefill_base_s: float = Field(default=_COSTS.prefill_base_s, ge=0, description="sim: a step with a prompt")
    sim_prefill_token_s: float = Field(default=_COSTS.prefill_token_s, ge=0, description="sim: each prompt token")
    sim_decode_base_s: float = Field(default=_COSTS.decode_base_s, ge=0, description="sim: a decode step")
    sim_decode_sequence_s: float = Field(
        default=_COSTS.decode_sequence_s, ge=0, description="sim: each sequence in a decode step"
    )
    sim_decode_resident_token_s: float = Field(
        default=_COSTS.decode_resident_token_s, ge=0, description="sim: each token of KV read by a decode step"
    )
    sim_eos_chance: float = Field(default=0.0, ge=0, le=1, description="sim: chance that a token ends the sequence")

    def engine_config(self, model_name: str | None = None, model: Path | None = None) -> EngineConfig:
        """Holds only what was set: an engine that has defaults of its own tells the two apart.

        `model_name`, with its folder: of another model than the process' own.
        """
        given = self.model_fields_set
        passed = {theirs: getattr(self, ours) for ours, theirs in _PASSED_ON.items() if ours in given}
        costs = {name: getattr(self, f"sim_{name}") for name in _COST_NAMES if f"sim_{name}" in given}
        sim = SimConfig(costs=SimCosts(**costs), eos_chance=self.sim_eos_chance)
        if model_name is not None:
            passed["model_path"] = model
        return EngineConfig(kind=self.kind, model_name=model_name or self.model_name, sim=sim, **passed)


_PASSED_ON = {
    "model": "model_path",
    "max_model_len": "max_model_len_tokens",
    **{
        name: name
        for name in (
            "kv_layout", "kv_blocks", "kv_cache_bytes", "max_batch", "max_waiting", "prefill_chunk_tokens", "threads",
            "prefix_cache",
            "device", "vllm_args",
        )
    },
}  # fmt: skip
_COST_NAMES = tuple(field.name for field in fields(SimCosts))


class WorkerConfig(EngineSettings):
    PREFIX: ClassVar[str] = "WORKER"

    id: WorkerId = Field(pattern=_NAME, description="Name of this worker, unique in the cluster")
    node_id: NodeId = Field(default=NodeId("node"), pattern=_NAME, description="Node it runs on, and its relay's")
    vendor: str = Field(default="cpu", min_length=1, max_length=64, description="A label for people")
    relay_socket: Path | None = Field(default=None, description="The node's relay; empty: aggregated serving only")
    relay_connect_s: float = Field(default=5.0, gt=0, le=60, description="Longest attempt to attach to the relay")
    staging_wait_s: float = Field(
        default=3.0, gt=0, le=60, description="Longest wait for staging room; below the ingress' 5 s for a submit"
    )
    itl_target_s: float = Field(
        default=0.0, ge=0, le=60, description="Inter-token latency above which KV sent here is slowed down; 0: never"
    )
    roles_able: tuple[Role, ...] = Field(
        default=(), description="Roles that the planner may assign beside the unit's own: prefill,decode; empty: none"
    )
    models: tuple[str, ...] = Field(
        default=(),
        max_length=64,
        description="Models that the planner may assign beside the engine's own: name=folder, …; sim: name=",
        json_schema_extra={"allowed": "name=folder, separated by commas"},
    )
    linger_s: float = Field(
        default=5.0,
        ge=0,
        le=600,
        description="A role or model that ends takes what was routed to it before for so long; above staging_wait_s",
    )
    drain_s: float = Field(default=15.0, ge=0, le=3600, description="From SIGTERM until running sequences are ended")

    @model_validator(mode="after")
    def _loadable(self) -> WorkerConfig:
        try:
            folders = parse_model_folders(self.models)
        except ConfigInvalid as error:
            raise ValueError(f"ISTHMUS_WORKER_MODELS: {error.text}") from error
        if folders and self.kind is EngineKind.VLLM:
            raise ValueError(
                "ISTHMUS_WORKER_MODELS: none can be loaded while vLLM runs; start another worker for another model"
            )
        bare = [name for name, folder in folders.items() if folder is None]
        if bare and self.kind is not EngineKind.SIM:
            raise ValueError(f"ISTHMUS_WORKER_MODELS has no folder for {bare[0]!r}; write {bare[0]}=folder")
        return self

    @property
    def model_names(self) -> tuple[str, ...]:
        """The engine's own first."""
        return tuple(dict.fromkeys((self.model_name, *parse_model_folders(self.models))))

    def engine_for(self, model: str) -> EngineConfig:
        """Of one of `model_names`."""
        if model == self.model_name:
            return self.engine_config()
        return self.engine_config(model, parse_model_folders(self.models)[model])
