"""Settings of the ingress: `ISTHMUS_INGRESS_*` beside those that every process has."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr, model_validator

from isthmus_ingress.slo import SloClasses, read_classes
from isthmus_ingress.tenants import Entry, read_tenants
from isthmus_ingress.text import find_tokenizer
from isthmus_shared.config import ServiceConfig, secret_field
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.models import parse_model_folders


class IngressConfig(ServiceConfig):
    PREFIX: ClassVar[str] = "INGRESS"

    id: str = Field(
        default="ingress",
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="Name of this ingress; two processes may share it, since each life has its own subject",
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="Where the API listens")
    port: int = Field(default=8000, ge=0, le=65535, description="Its port; 0 takes a free one")
    share_port: bool = Field(
        default=False,
        description="Listen on the port together with other ingresses of this machine that have it set too, each with"
        " an id of its own: one process uses one core, and the kernel spreads connections among them",
    )
    model: Path = Field(description="Folder of the model's tokenizer.json, tokenizer_config.json and chat template")
    model_name: str | None = Field(
        default=None, min_length=1, max_length=256, description="Model served; unset: whatever the workers serve"
    )
    models: tuple[str, ...] = Field(
        default=(),
        max_length=64,
        description="Models served beside that one: name=folder, …; a request that names no model is for the first",
        json_schema_extra={"allowed": "name=folder, separated by commas"},
    )
    api_keys: tuple[SecretStr, ...] = secret_field(
        default=(), description="Keys of which a client must send one (Authorization: Bearer …); none: everyone may"
    )
    tenants: Path | None = Field(
        default=None,
        description="File of clients with keys, quotas and SLO classes of their own (docs/security.md); "
        "with it, a client must send a key",
    )
    slo_classes: Path | None = Field(
        default=None, description="File of SLO classes that keys have and requests may name (docs/admission.md)"
    )
    admin_keys: tuple[SecretStr, ...] = secret_field(
        default=(),
        description="Keys for the state that the page /ui shows; none: for everyone, unless API keys are set",
    )
    request_timeout_s: float = Field(default=600.0, gt=0, le=86_400, description="One request, over all its attempts")
    attempts: int = Field(default=3, ge=1, le=16, description="Routes tried before a request fails")
    route_patience_s: float = Field(
        default=15.0,
        ge=0,
        le=3600,
        description="How long a request that has lost a worker waits for another, or for that one to start again",
    )
    itl_target_s: float = Field(
        default=0.0, ge=0, le=60, description="A longer wait between two tokens is counted by cause; 0: no such target"
    )
    max_in_flight: int = Field(
        default=2048, ge=1, le=100_000, description="Choices in progress; more are refused (429)"
    )
    max_connections: int = Field(
        default=8192, ge=1, le=1_000_000, description="HTTP connections at once; one more is answered 503 and closed"
    )
    max_body_bytes: int = Field(
        default=4 * 1024 * 1024, ge=1024, le=1024**3, description="Largest request body; a larger one is refused (413)"
    )
    max_bodies_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1024,
        description="Bodies of all requests that are not admitted yet; beyond, one is refused (429)",
    )
    body_timeout_s: float = Field(default=30.0, gt=0, le=3600, description="From a request's head to its body's end")
    write_stall_s: float = Field(
        default=30.0, gt=0, le=3600, description="A client that takes no bytes for so long is cut off"
    )

    @model_validator(mode="after")
    def _named(self) -> IngressConfig:
        try:
            folders = parse_model_folders(self.models)
        except ConfigInvalid as error:
            raise ValueError(f"ISTHMUS_INGRESS_MODELS: {error.text}") from error
        bare = [name for name, folder in folders.items() if folder is None]
        if bare:
            raise ValueError(f"ISTHMUS_INGRESS_MODELS has no folder for {bare[0]!r}; write {bare[0]}=folder")
        if folders and self.model_name is None:
            raise ValueError(
                "ISTHMUS_INGRESS_MODELS needs ISTHMUS_INGRESS_MODEL_NAME, the name of the one in ISTHMUS_INGRESS_MODEL"
            )
        if self.model_name in folders:
            raise ValueError(
                f"ISTHMUS_INGRESS_MODELS names {self.model_name!r}, which is ISTHMUS_INGRESS_MODEL_NAME already"
            )
        return self

    def check(self) -> None:
        for folder in (self.model, *self.more_models.values()):
            find_tokenizer(folder)
        pipes = [path for path in (self.tenants, self.slo_classes) if path is not None and _is_pipe(path)]
        if pipes:
            return  # which is read once, when it is needed
        self.read_clients()

    def read_clients(self) -> tuple[tuple[Entry, ...], SloClasses]:
        """What the files of tenants and of classes say. Raises `ConfigInvalid`, also when they do not fit."""
        entries = () if self.tenants is None else read_tenants(self.tenants)
        classes = read_classes(self.slo_classes)
        if self.slo_classes is not None:
            classes.check_names((entry.tenant.name, entry.tenant.slo_class) for entry in entries)
        return entries, classes

    @property
    def more_models(self) -> dict[str, Path]:
        """Folder by name, of all but the first."""
        return {name: folder for name, folder in parse_model_folders(self.models).items() if folder is not None}


def _is_pipe(path: Path) -> bool:
    try:
        return path.exists() and not path.is_file() and not path.is_dir()
    except OSError:
        return False  # reading it says why
