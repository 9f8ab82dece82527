"""The cluster file: what `isthmus up CLUSTER.yaml` starts. `demo.yaml` beside this file explains every field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.kv.layout import KvLayout
from isthmus_shared.yaml_text import load_yaml

MAX_PROCESSES = 64
"""Workers and relays of one local cluster; more would not fit one machine, and is a slip of the pen."""
MAX_PROBLEMS = 10
"""Shown at once; a file with more is better read from its top."""

OTHER_NAMES = ("nats-server", "planner", "ingress", "operator", "client")
"""Of processes, and of users of the bus."""

Engine = Literal["reference", "sim", "vllm"]
Mode = Literal["disaggregated", "aggregated", "auto"]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,47}$")]
"""Becomes part of bus subjects, file names and metrics, hence the narrow alphabet."""
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSpec(_Spec):
    name: str = Field(default="isthmus-demo", min_length=1, max_length=200)
    """What clients send as `model`."""
    path: Path | None = None
    """A Hugging Face folder (config.json, *.safetensors, tokenizer.json), relative to the file. None: the demo's."""


class IngressSpec(_Spec):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free one."""
    env: dict[EnvName, str] = {}


class PlannerSpec(_Spec):
    mode: Mode = "disaggregated"
    env: dict[EnvName, str] = {}


class RelaySpec(_Spec):
    pool_mib: int = Field(default=256, ge=4, le=1 << 20)
    """Staging memory of the node."""
    env: dict[EnvName, str] = {}


class WorkerSpec(_Spec):
    id: Name
    role: Literal["prefill", "decode"]
    vendor: Name = "cpu"
    """A label for people."""
    kv_layout: str = "nhd:16:fp32"
    """order:block tokens:dtype, and optionally how K is packed, e.g. ``hnd:64:fp32:packed4``."""
    kv_blocks: int | None = Field(default=None, gt=0)
    max_batch: int | None = Field(default=None, gt=0)
    prefill_chunk_tokens: int | None = Field(default=None, gt=0)
    threads: int | None = Field(default=None, gt=0)
    engine: Engine | None = None
    """Another one than the cluster's."""
    vllm: dict[str, Any] = {}
    """Arguments of vLLM's engine, e.g. ``{dtype: float32, kv_cache_memory_bytes: 67108864}``."""
    env: dict[EnvName, str] = {}

    @field_validator("kv_layout")
    @classmethod
    def _known_layout(cls, text: str) -> str:
        try:
            return str(KvLayout.parse(text))
        except ConfigInvalid as error:
            raise ValueError(error.text) from error


class NodeSpec(_Spec):
    id: Name
    relay: RelaySpec | None = RelaySpec()
    """None: no relay, so that node's workers serve aggregated only."""
    workers: tuple[WorkerSpec, ...] = Field(min_length=1)


class ClusterSpec(_Spec):
    model: ModelSpec = ModelSpec()
    engine: Engine = "reference"
    ingress: IngressSpec = IngressSpec()
    planner: PlannerSpec = PlannerSpec()
    env: dict[EnvName, str] = {}
    """For every process."""
    nodes: tuple[NodeSpec, ...] = Field(min_length=1)

    @property
    def workers(self) -> tuple[WorkerSpec, ...]:
        return tuple(worker for node in self.nodes for worker in node.workers)

    @model_validator(mode="after")
    def _sound(self) -> ClusterSpec:
        for what, ids in (("node", [n.id for n in self.nodes]), ("worker", [w.id for w in self.workers])):
            twice = sorted({name for name in ids if ids.count(name) > 1})
            if twice:
                raise ValueError(f"{what} id {twice[0]!r} is used twice; every {what} needs its own")
        processes = {*OTHER_NAMES, *(f"relay-{node.id}" for node in self.nodes)}
        taken = sorted(processes.intersection(worker.id for worker in self.workers))
        if taken:
            raise ValueError(f"worker id {taken[0]!r} is the name of another process of the cluster")
        idle = sorted(w.id for w in self.workers if w.vllm and (w.engine or self.engine) != "vllm")
        if idle:
            raise ValueError(f"worker {idle[0]!r} has arguments for vLLM, but its engine is another; set engine: vllm")
        if all(worker.role != "decode" for worker in self.workers):
            raise ValueError("no worker has role 'decode'; at least one is needed to answer anything")
        if len(self.nodes) + len(self.workers) > MAX_PROCESSES:
            raise ValueError(f"more than {MAX_PROCESSES} nodes and workers on one machine")
        return self

    @classmethod
    def checked(cls, fields: Mapping[str, object], name: str) -> ClusterSpec:
        """Raises `ConfigInvalid` naming the field and what is wrong."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _invalid(name, None, error) from error

    def on_one_node(self) -> ClusterSpec:
        """The same workers, all on the first node: KV then crosses through that node's shared memory."""
        first = self.nodes[0]
        return self.model_copy(update={"nodes": (first.model_copy(update={"workers": self.workers}),)})


def demo_text() -> str:
    return resources.files("isthmus_cli").joinpath("demo.yaml").read_text(encoding="utf-8")


def load(path: Path | None) -> ClusterSpec:
    """The cluster in that file, or the demo. Raises `ConfigInvalid` naming file, line, field and what is wrong."""
    if path is None:
        return parse(demo_text(), "demo.yaml")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} cannot be read", why=str(error)) from error
    spec = parse(text, str(path))
    if spec.model.path is None:
        return spec
    found = spec.model.model_copy(update={"path": path.parent / spec.model.path})
    return spec.model_copy(update={"model": found})


def parse(text: str, name: str) -> ClusterSpec:
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigInvalid(f"{name}{line}: not YAML", why=problem) from error
    except RecursionError as error:
        raise ConfigInvalid(f"{name}: nested too deeply") from error
    fields = load_yaml(text, name)
    if not isinstance(fields, dict):
        raise ConfigInvalid(f"{name}: a cluster file is a mapping", why=f"found {type(fields).__name__}")
    try:
        return ClusterSpec.model_validate(fields)
    except ValidationError as error:
        raise _invalid(name, tree, error) from error


def _invalid(name: str, tree: yaml.Node | None, error: ValidationError) -> ConfigInvalid:
    problems = _own(error.errors(include_url=False, include_input=True))
    lines = [
        _problem(name, tree, problem["loc"], problem["msg"], problem["input"]) for problem in problems[:MAX_PROBLEMS]
    ]
    return ConfigInvalid("\n".join(lines), param=".".join(map(str, problems[0]["loc"])) or None)


def _own(problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without the lists that are "too short" only because what is wrong inside them does not count."""
    inner = [problem["loc"] for problem in problems]
    return [
        problem
        for problem in problems
        if problem["type"] != "too_short"
        or not any(len(loc) > len(problem["loc"]) and loc[: len(problem["loc"])] == problem["loc"] for loc in inner)
    ]


def _problem(name: str, tree: yaml.Node | None, loc: Sequence[int | str], message: str, value: object) -> str:
    at = name if tree is None else f"{name}:{_line_of(tree, loc)}"
    where = ".".join(map(str, loc)) or "cluster"
    given = f" (given: {value!r})" if isinstance(value, (str, int, float, bool)) else ""
    return f"{at}: {where}: {message}{given}"


def _line_of(tree: yaml.Node | None, loc: Sequence[int | str]) -> int:
    """The line of the innermost part of `loc` that the text has (a missing field is reported at its parent)."""
    node, line = tree, 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == str(part)]
            if not found:
                return line
            key, node = found[0]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            return line
    return line
