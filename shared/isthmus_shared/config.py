"""A process' settings: one frozen model, read once from `ISTHMUS_*`.

A field that `ServiceConfig` declares is ``ISTHMUS_<FIELD>``; one that a subclass declares is
``ISTHMUS_<PREFIX>_<FIELD>`` with that subclass' own `PREFIX`, so a model built from several classes keeps each class'
names. An empty variable counts as unset (compose files write ``X: ${X:-}``). Lists are separated by commas. Any
variable may be given as ``<NAME>_FILE`` instead, the path of a file that holds its value: so secrets stay out of the
environment.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from isthmus_shared.bus.login import BusLogin
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.messages.base import PREVIOUS, VERSION
from isthmus_shared.messages.health import HEARTBEAT_INTERVAL_S

ENV_ROOT = "ISTHMUS_"
KNOWN_PREFIXES = ("INGRESS", "PLANNER", "WORKER", "PREFILL", "DECODE", "RELAY", "ENGINE", "UP")
"""Other services' variables may lie in the same environment and are ignored."""
STANDARD_NAMES = {"nats_url": "NATS_URL", "otlp_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT"}
"""Names that the field's own tools read; ours wins when both are set."""
MASK = "***"
FILE_SUFFIX = "_FILE"
MAX_FILE_BYTES = 64 * 1024
"""A setting, even a list of keys, is smaller; a larger file was named by mistake."""


def secret_field(default: Any = None, *, description: str, **constraints: Any) -> Any:
    """A field whose value never shows in a repr, a log or an error."""
    return Field(default=default, description=description, json_schema_extra={"secret": True}, **constraints)


class ServiceConfig(BaseModel):
    """What every process has. Subclasses set `PREFIX` and add fields; mark a secret one with `secret_field`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    PREFIX: ClassVar[str] = ""
    TRACES: ClassVar[bool] = True
    """Whether the process has spans of its own to tell."""

    nats_url: str = Field(
        default="nats://127.0.0.1:4222",
        pattern=r"^(nats|tls)://\S+$",
        description="The bus server; `NATS_URL` is read when this is not set",
        json_schema_extra={"secret": "userinfo", "allowed": "nats://[user:password@]host:port or tls://…"},
    )
    nats_nkey: str | None = secret_field(
        min_length=1, description="Seed of the nkey of the user that the URL names, instead of a password"
    )
    nats_ca: Path | None = Field(default=None, description="PEM authorities of a tls:// server; else the system's")
    nats_cert: Path | None = Field(default=None, description="PEM certificate to show the bus server")
    nats_key: Path | None = Field(default=None, description="Its private key")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level logged")
    log_format: Literal["json", "console"] = Field(default="json", description="One JSON object a line, or for people")
    http_host: str = Field(default="127.0.0.1", min_length=1, description="Where /health and /metrics listen")
    http_port: int = Field(default=0, ge=0, le=65535, description="Their port; 0 takes a free one")
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://\S+$",
        description="Where traces go (docs/tracing.md); `OTEL_EXPORTER_OTLP_ENDPOINT` is read when this is not set",
        json_schema_extra={"secret": "userinfo", "allowed": "http://host:port or https://… of an OTLP/HTTP collector"},
    )
    wire_version: int = Field(
        default=VERSION,
        ge=PREVIOUS,
        le=VERSION,
        description="Version of the messages it sends; the one before, while processes of the release before still run",
    )
    heartbeat_interval_s: float = Field(
        default=HEARTBEAT_INTERVAL_S, ge=0.05, le=60, description="Between two heartbeats of this process"
    )
    shutdown_grace_s: float = Field(
        default=20.0, ge=0, le=3600, description="From SIGTERM until what still runs is cancelled"
    )

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> Self:
        """`ConfigInvalid` names every unknown or invalid variable, its value and what is allowed."""
        names = {env_name(cls, field): field for field in cls.model_fields}
        values: dict[str, Any] = {}
        environ, problems = _with_files(environ, (*names, *STANDARD_NAMES.values()))
        problems += [
            (name, _unknown(cls, name, value, names))
            for name, value in sorted(environ.items())
            if name not in names and _is_ours(cls, name)
        ]
        for name, field in names.items():
            source = name if environ.get(name) else STANDARD_NAMES.get(field, name)
            if environ.get(source):
                values[field] = _split(environ[source], cls.model_fields[field])
        try:
            loaded = cls.model_validate(values)
        except ValidationError as error:
            problems += [_invalid(cls, detail, environ) for detail in error.errors(include_url=False)]
        if problems:
            raise ConfigInvalid(
                "1 setting is invalid" if len(problems) == 1 else f"{len(problems)} settings are invalid",
                why="\n  ".join(["", *(text for _, text in problems)]),
                todo="correct or unset them",
                param=problems[0][0],
            )
        return loaded

    @property
    def bus_login(self) -> BusLogin:
        return BusLogin(nkey=self.nats_nkey, ca=self.nats_ca, cert=self.nats_cert, key=self.nats_key)

    def check(self) -> None:
        """Before anything is begun: whether what the settings name can be had. Raises `ConfigInvalid`."""

    def masked(self) -> dict[str, Any]:
        """Every setting by field name, fit for a log: secrets are masked."""
        return {name: _mask(value, type(self).model_fields[name]) for name, value in self}

    def __repr_args__(self) -> typing.Iterable[tuple[str | None, Any]]:
        return list(self.masked().items())


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the documentation."""

    variable: str
    default: str
    meaning: str
    allowed: str


def settings_of(model: type[ServiceConfig], *, own_only: bool = False) -> list[Setting]:
    """Every variable of a model, in order of declaration; `own_only` leaves out those all processes have."""
    return [
        Setting(
            variable=env_name(model, name),
            default=_default_text(field),
            meaning=field.description or "",
            allowed=allowed_text(field),
        )
        for name, field in model.model_fields.items()
        if not (own_only and name in ServiceConfig.model_fields)
    ]


def env_name(model: type[ServiceConfig], field: str) -> str:
    declaring = next(base for base in reversed(model.__mro__) if field in vars(base).get("__annotations__", {}))
    prefix = getattr(declaring, "PREFIX", "")
    return f"{ENV_ROOT}{prefix}_{field.upper()}" if prefix else f"{ENV_ROOT}{field.upper()}"


def allowed_text(field: FieldInfo) -> str:
    """What a value may be, in words."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and isinstance(extra.get("allowed"), str):
        return str(extra["allowed"])
    text = _type_text(field.annotation)
    bounds = [
        f"{sign} {value:g}" if isinstance(value, float) else f"{sign} {value}"
        for constraint in field.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if (value := getattr(constraint, attribute, None)) is not None
    ]
    patterns = [f"matching {c.pattern}" for c in field.metadata if getattr(c, "pattern", None)]
    return ", ".join([text, *bounds, *patterns])


def _with_files(
    environ: Mapping[str, str], names: typing.Iterable[str]
) -> tuple[Mapping[str, str], list[tuple[str, str]]]:
    """The environment with every ``<NAME>_FILE`` replaced by NAME and what its file holds, and what went wrong."""
    found, problems = dict(environ), []
    for name in names:
        path = found.pop(name + FILE_SUFFIX, "")
        if not path:
            continue
        variable = name + FILE_SUFFIX
        if found.get(name):
            problems.append((variable, f"{variable} and {name} are both set; set one of them"))
            continue
        try:
            with Path(path).open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
            found[name] = content.decode().strip()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            problems.append((variable, f"{variable}={path!r} cannot be read: {why}"))
    return found, problems


def _own_prefixes(cls: type[ServiceConfig]) -> set[str]:
    return {base.PREFIX for base in cls.__mro__ if issubclass(base, ServiceConfig) and base.PREFIX}


def _is_ours(cls: type[ServiceConfig], name: str) -> bool:
    """Whether a variable would be ours to know: in one of our prefixes, or in nobody's."""
    if not name.startswith(ENV_ROOT):
        return False
    rest = name.removeprefix(ENV_ROOT)
    if any(rest.startswith(f"{prefix}_") for prefix in _own_prefixes(cls)):
        return True
    return not any(rest.startswith(f"{prefix}_") for prefix in KNOWN_PREFIXES)


def _unknown(cls: type[ServiceConfig], name: str, value: str, names: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(sorted(names))
    # What the variable was meant to be is unknown, so it may be a secret: only its length is told.
    return f"{name} ({len(value)} characters) is not a setting of this process; {hint}"


def _invalid(cls: type[ServiceConfig], detail: Any, environ: Mapping[str, str]) -> tuple[str, str]:
    if not detail["loc"]:
        return "", _said(detail)  # a rule over several fields; its text names them
    field = str(detail["loc"][0])
    name = env_name(cls, field)
    shown = name if environ.get(name) else STANDARD_NAMES.get(field, name)
    info = cls.model_fields[field]
    if not environ.get(shown):
        return name, f"{name} is not set; required: {info.description or field}; allowed: {allowed_text(info)}"
    value = MASK if _secrecy(info) else repr(environ[shown])
    return name, f"{shown}={value}: {_said(detail)}; allowed: {allowed_text(info)}"


def _said(detail: Any) -> str:
    return str(detail["msg"]).removeprefix("Value error, ")


def _split(text: str, field: FieldInfo) -> Any:
    if typing.get_origin(_without_none(field.annotation)) in (tuple, list, set, frozenset):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _secrecy(field: FieldInfo) -> Any:
    if _without_none(field.annotation) is SecretStr:
        return True
    extra = field.json_schema_extra
    return extra.get("secret") if isinstance(extra, dict) else None


def _mask(value: Any, field: FieldInfo) -> Any:
    secrecy = _secrecy(field)
    if not secrecy or value is None:
        return value
    if secrecy == "userinfo" and isinstance(value, str):
        scheme, _, rest = value.partition("://")
        userinfo, at, host = rest.rpartition("@")
        return f"{scheme}://{MASK}@{host}" if at and userinfo else value
    return MASK


def _without_none(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kinds = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation


def _type_text(annotation: Any) -> str:
    annotation = _without_none(annotation)
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return " | ".join(str(value) for value in typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(str(member.value) for member in annotation)
    if origin in (tuple, list, set, frozenset):
        return f"comma-separated {_type_text(typing.get_args(annotation)[0])}"
    words = {bool: "true | false", int: "integer", float: "number", str: "text", SecretStr: "text", Path: "path"}
    return words.get(annotation) or str(getattr(annotation, "__name__", annotation))


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value == ():
        return ""
    if _secrecy(field) is True:
        return MASK
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(str(part) for part in value)
    return str(value.value if isinstance(value, Enum) else value)
