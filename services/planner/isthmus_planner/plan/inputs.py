"""What an operator writes: a cluster of node types, and a workload with its targets. YAML at the edge."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from isthmus_planner.cost import catalog
from isthmus_planner.cost.calibration import codec, packaged
from isthmus_planner.cost.calibration.store import Calibration
from isthmus_planner.cost.constants import NUMBERS
from isthmus_planner.cost.layout import Precision
from isthmus_planner.cost.profiles import AcceleratorProfile
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.yaml_text import load_yaml

MAX_FILE_BYTES = 1 << 20
"""A page of text; a file a thousand times that is another file (a trace goes into `trace`)."""
MAX_PROBLEMS = 10
"""Shown at once."""
MAX_NODE_TYPES = 64
MAX_NODES_PER_TYPE = 4096
MAX_TOKENS = 10_000_000
"""Of one prompt or answer; more is a slip of the pen."""

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, given: Any) -> Any:
        """No field is one, and `yes` would count as 1."""
        if isinstance(given, bool):
            raise ValueError("true and false (also yes, no, on, off) are no value here")
        return given


class NodeTypeSpec(_Spec):
    """Equal servers."""

    accelerator: str
    """A profile's name or alias, or the path of a YAML profile."""
    name: Name | None = None
    """By default the accelerator's."""
    count: int = Field(ge=1, le=MAX_NODES_PER_TYPE)
    accelerators: int = Field(default=8, ge=1, le=256)
    """In one server."""
    tp: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Tensor-parallel sizes to try; by default every divisor of `accelerators` that fits."""
    price_usd_per_h: Positive | None = None
    """Of one accelerator; by default the profile's."""
    nic_gbit_per_s: Positive | None = None
    """Of the whole server, one direction; by default the profile's, times `accelerators`."""
    framework: str | None = None
    """The engine whose measurements are taken (`vllm`, `sglang`, ...); by default the one measured most."""
    constants: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}
    """Single ones of your own, by the names that `isthmus calibrate` prints; what they are worth is not known here, so
    the p90 stays as wide as without them. Measurements do better: `isthmus plan --constants`."""

    @field_validator("constants")
    @classmethod
    def _known(cls, given: dict[str, float]) -> dict[str, float]:
        for name in given:
            if name not in NUMBERS:
                raise ValueError(f"{name!r} is no constant; {_suggest(name, NUMBERS)}")
        return given


class RelaySpec(_Spec):
    post_us: Positive = 2.4
    """Of the decode node's host, for one descriptor."""
    copies_per_byte: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """How often a received byte passes device memory: written to it, and read and written again by a scatter."""
    setup_ms: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    chunk_bytes: int = Field(default=1 << 20, ge=4096)
    round_trip_us: float = Field(default=50.0, ge=0, allow_inf_nan=False)
    drain_us: float = Field(default=200.0, ge=0, allow_inf_nan=False)
    queue_depth: int = Field(default=4351, ge=1)
    """Descriptors that a NIC takes at once."""


class ClusterFile(_Spec):
    nodes: tuple[NodeTypeSpec, ...] = Field(min_length=1, max_length=MAX_NODE_TYPES)
    relay: RelaySpec = RelaySpec()


class LengthSpec(_Spec):
    """Log-normal by mean and spread, or uniform from `low` to `high`."""

    mean: Tokens | None = None
    cv: float = Field(default=0.0, ge=0, le=5, allow_inf_nan=False)
    """Standard deviation over mean."""
    low: Tokens | None = None
    high: Tokens | None = None

    @model_validator(mode="after")
    def _one_form(self) -> LengthSpec:
        uniform = self.low is not None and self.high is not None
        if (self.mean is not None) == uniform or (self.low is None) != (self.high is None):
            raise ValueError("give either `mean` (and `cv`), or `low` and `high`")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        return self


class RequestSpec(_Spec):
    """Requests of one kind."""

    name: Name = "requests"
    share: Positive = 1.0
    """Of all requests, relative to the other kinds' shares."""
    isl_tokens: Tokens | LengthSpec
    osl_tokens: Tokens | LengthSpec


class WorkloadFile(_Spec):
    model: str
    """A profile's name, the path of a YAML profile, or a Hugging Face folder."""
    requests: tuple[RequestSpec, ...] = Field(default=(), max_length=64)
    trace: Path | None = None
    """Instead of `requests`: a Mooncake (.jsonl) or Azure (.csv) trace, whose lengths are taken."""
    requests_per_s: Positive | None = None
    """What must be served; by default as much as possible is."""
    ttft_ms: Positive | None = None
    """Median time to first token, at most. Without it the cluster runs saturated and requests queue."""
    itl_ms: Positive | None = None
    """Mean time between tokens of the median request, at most."""
    objective: Literal["throughput", "price", "both"] = "both"
    kv: Literal["bf16", "fp8"] = "bf16"
    max_batch: int = Field(default=1024, ge=1, le=65_536)
    """Sequences that an engine decodes at once, at most."""
    prefix_hit_share: float = Field(default=0.0, ge=0, lt=1, allow_inf_nan=False)
    """Part of every prompt that is cached where it is prefilled."""

    @model_validator(mode="after")
    def _some(self) -> WorkloadFile:
        if bool(self.requests) == (self.trace is not None):
            raise ValueError("give `requests` (a list of kinds) or `trace` (a file), one of them")
        names = [kind.name for kind in self.requests]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two kinds of requests are named {twice[0]!r}; give each its own name")
        return self

    @property
    def kv_precision(self) -> Precision:
        return Precision(self.kv)


_File = TypeVar("_File", bound=_Spec)


def load_cluster(path: Path) -> ClusterFile:
    """Raises `ConfigInvalid` naming file, field and what is wrong."""
    return _load(path, ClusterFile)


def load_workload(path: Path) -> WorkloadFile:
    """A relative `trace` is relative to the file."""
    workload = _load(path, WorkloadFile)
    if workload.trace is None:
        return workload
    return workload.model_copy(update={"trace": path.parent / workload.trace})


def load_calibration(path: Path) -> Calibration:
    """Constants that `isthmus calibrate --out` wrote, before the package's where both have the same pair."""
    own, ours = codec.load(_text(path), packaged.names(), str(path)), packaged.constants()
    known = {each.key for each in own.fits}
    others = tuple(each for each in ours.fits if each.key not in known)
    return Calibration(f"{own.source}; {ours.source}", own.fits + others, ours.specification_spread)


def accelerator(name: str, base: Path) -> AcceleratorProfile:
    """With the near names when it is unknown. A profile's file is relative to the cluster file's folder `base`."""
    if name.endswith(catalog.SUFFIXES):
        return catalog.accelerator(str(base / name))
    try:
        return catalog.accelerator(name)
    except ConfigInvalid as error:
        known = sorted(catalog.accelerators())
        raise ConfigInvalid(error.what, todo=f"{_suggest(name, known)}; or give the path of a YAML profile") from error


def _suggest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"


def _load(path: Path, kind: type[_File]) -> _File:
    fields = _mapping(path)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        lines = [_problem(path, problem, kind) for problem in problems[:MAX_PROBLEMS]]
        raise ConfigInvalid("\n".join(dict.fromkeys(lines)), todo="see docs/planning.md") from error


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigInvalid(f"{path} is too large", why=f"it has more than {MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} cannot be read", why=str(error), todo="give a readable text file") from error


def _mapping(path: Path) -> dict[str, Any]:
    fields = load_yaml(_text(path), str(path))
    if not isinstance(fields, dict):
        raise ConfigInvalid(
            f"{path} holds no mapping", why=f"found {type(fields).__name__}", todo="see docs/planning.md"
        )
    return fields


def _problem(path: Path, problem: Any, kind: type[_Spec]) -> str:
    where = ".".join(str(part) for part in problem["loc"] if part not in ("constrained-int", "int", "LengthSpec"))
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        message = f"is no field of this file; {_suggest(str(problem['loc'][0]), list(kind.model_fields))}"
    value = problem["input"]
    given = f" (given: {value!r})" if isinstance(value, (str, int, float, bool)) else ""
    return f"{path}: {where or 'file'}: {message}{given}"
