"""Reads profiles: those in the package, an operator's own YAML files, and Hugging Face model folders.

The only module of the cost model that touches files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isthmus_planner.cost.hf_config import model_from_hf
from isthmus_planner.cost.layout import Precision
from isthmus_planner.cost.profiles import AcceleratorProfile, Mla, ModelProfile, WeightBits
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.yaml_text import load_yaml

MAX_PROFILE_BYTES = 1 << 20
"""A profile has a page of text; a file a thousand times that is not one."""
SUFFIXES = (".yaml", ".yml")

_Profile = TypeVar("_Profile", AcceleratorProfile, ModelProfile)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Figure(_Part):
    value: float | None
    source: str = Field(min_length=1)


class _Figures(_Part):
    bf16_flop_per_s: _Figure | None = None
    fp8_flop_per_s: _Figure | None = None
    fp4_flop_per_s: _Figure | None = None
    memory_bytes: _Figure | None = None
    memory_bytes_per_s: _Figure | None = None
    scale_up_bytes_per_s: _Figure | None = None
    nic_bits_per_s: _Figure | None = None
    power_w: _Figure | None = None
    price_usd_per_h: _Figure | None = None


class _AcceleratorFile(_Part):
    name: str = Field(min_length=1)
    title: str = ""
    vendor: str
    aliases: tuple[str, ...] = ()
    formats: tuple[Precision, ...] = Field(min_length=1)
    figures: _Figures

    def profile(self) -> AcceleratorProfile:
        given = {name: figure for name, figure in self.figures if figure is not None}
        return AcceleratorProfile(
            name=self.name,
            title=self.title or self.name,
            vendor=self.vendor,
            formats=self.formats,
            aliases=self.aliases,
            sources=MappingProxyType({name: figure.source for name, figure in given.items()}),
            **{name: figure.value for name, figure in given.items()},
        )


class _MlaPart(_Part):
    latent_dim: int = Field(gt=0)
    rope_dim: int = Field(ge=0)
    qk_dim: int = Field(gt=0)
    v_dim: int = Field(gt=0)


class _Params(_Part):
    dense: float = Field(gt=0)
    expert: float = Field(ge=0)
    embedding: float = Field(ge=0)


class _Bits(_Part):
    dense: float = Field(gt=0, le=32)
    experts: float = Field(gt=0, le=32)
    source: str = Field(min_length=1)


class _ModelFile(_Part):
    name: str = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    source: str = Field(min_length=1)
    full_layers: int = Field(ge=0)
    window_layers: int = Field(default=0, ge=0)
    window_tokens: int = Field(default=0, ge=0)
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = Field(default=0, ge=0)
    experts_per_token: int = Field(default=0, ge=0)
    max_context_tokens: int | None = None
    mla: _MlaPart | None = None
    params: _Params
    precision: Precision
    bits: Mapping[Precision, _Bits]

    def profile(self) -> ModelProfile:
        fields = self.model_dump(exclude={"params", "bits", "mla", "source"})
        bits = {precision: WeightBits(each.dense, each.experts) for precision, each in self.bits.items()}
        return ModelProfile(
            **fields,
            dense_params=self.params.dense,
            expert_params=self.params.expert,
            embedding_params=self.params.embedding,
            bits=MappingProxyType(bits),
            mla=None if self.mla is None else Mla(**self.mla.model_dump()),
            sources=MappingProxyType({"": self.source} | {f"bits.{p}": each.source for p, each in self.bits.items()}),
        )


def accelerators() -> Mapping[str, AcceleratorProfile]:
    """All profiles of the package, by name."""
    return _accelerators()


def models() -> Mapping[str, ModelProfile]:
    return _models()


def accelerator(name: str) -> AcceleratorProfile:
    """By name or alias (case and surrounding blanks aside), or from a YAML file. Raises `ConfigInvalid`."""
    path = _own_file(name)
    if path is not None:
        return _accelerator_of(_mapping(_text(path), str(path)), str(path))
    return _named(_accelerators(), name, "accelerator")


def model(name: str) -> ModelProfile:
    """By name or alias, from a YAML file, or from a Hugging Face folder or its `config.json`."""
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return model_from_folder(path)
    own = _own_file(name)
    if own is not None:
        return _model_of(_mapping(_text(own), str(own)), str(own))
    return _named(_models(), name, "model")


def packaged_constants() -> str:
    """Text of the constants that were fitted to the public measurements; `calibration.codec.load` reads it."""
    return resources.files("isthmus_planner.cost").joinpath("data", "constants.yaml").read_text(encoding="utf-8")


def model_from_folder(path: Path) -> ModelProfile:
    """A folder with a Hugging Face `config.json`, or that file."""
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{file} is not JSON", why=str(error), todo="give a model's config.json") from error
    if not isinstance(fields, dict):
        raise ConfigInvalid(f"{file} holds no mapping", todo="give a model's config.json")
    return model_from_hf(file.resolve().parent.name, fields)


@cache
def _accelerators() -> Mapping[str, AcceleratorProfile]:
    profiles = [_accelerator_of(_mapping(text, name), name) for name, text in _packaged("accelerators")]
    return MappingProxyType({profile.name: profile for profile in profiles})


@cache
def _models() -> Mapping[str, ModelProfile]:
    profiles = [_model_of(_mapping(text, name), name) for name, text in _packaged("models")]
    return MappingProxyType({profile.name: profile for profile in profiles})


def _packaged(folder: str) -> list[tuple[str, str]]:
    files = resources.files("isthmus_planner.cost").joinpath("data", folder).iterdir()
    return sorted((file.name, file.read_text(encoding="utf-8")) for file in files if file.name.endswith(".yaml"))


def _own_file(name: str) -> Path | None:
    return Path(name) if name.endswith(SUFFIXES) else None


def _named(profiles: Mapping[str, _Profile], name: str, kind: str) -> _Profile:
    wanted = name.strip().lower()
    for profile in profiles.values():
        if wanted == profile.name or wanted in profile.aliases:
            return profile
    raise ConfigInvalid(
        f"the {kind} {name!r} is not known",
        todo=f"known are {', '.join(profiles)}; or name a YAML file with a profile of your own (docs/cost-model.md)",
        param=kind,
    )


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_PROFILE_BYTES:
            raise ConfigInvalid(f"{path} is too large", todo=f"a profile has at most {MAX_PROFILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"cannot read {path}", why=str(error), todo="give a readable text file") from error


def _mapping(text: str, where: str) -> dict[str, Any]:
    fields = load_yaml(text, where)
    if not isinstance(fields, dict):
        raise ConfigInvalid(f"{where} holds no mapping", todo="see the profiles in docs/cost-model.md")
    return fields


def _accelerator_of(fields: dict[str, Any], where: str) -> AcceleratorProfile:
    try:
        return _AcceleratorFile.model_validate(fields).profile()
    except ValidationError as error:
        raise _bad(error, where) from error


def _model_of(fields: dict[str, Any], where: str) -> ModelProfile:
    try:
        return _ModelFile.model_validate(fields).profile()
    except ValidationError as error:
        raise _bad(error, where) from error


def _bad(error: ValidationError, where: str) -> ConfigInvalid:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return ConfigInvalid(f"{where}: {field}", why=first["msg"], todo="correct the profile", param=field)
