"""A calibration as YAML text and back. Pure: files are the caller's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isthmus_planner.cost.calibration.groups import GroupKey, Subject
from isthmus_planner.cost.calibration.measurements import Catalog
from isthmus_planner.cost.calibration.parameters import NAMES
from isthmus_planner.cost.calibration.store import Calibration, GroupFit, Range
from isthmus_planner.cost.constants import Constants
from isthmus_planner.cost.profiles import AcceleratorProfile, ModelProfile
from isthmus_shared.errors import ConfigInvalid
from isthmus_shared.yaml_text import load_yaml

DIGITS = 4
"""Significant ones in the file: far finer than the constants are known, and short enough to compare by eye."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Range(_Part):
    accelerators: tuple[int, ...] = Field(min_length=1)
    concurrency: tuple[float, float]
    isl_tokens: tuple[float, float]
    osl_tokens: tuple[float, float]


class _Group(_Part):
    accelerator: str
    model: str
    framework: str
    precision: str
    dp_attention: bool = False
    expert_parallel: bool = False
    points: int = Field(ge=0)
    constants: dict[str, float]
    spread: dict[str, float] = {}
    errors: dict[str, dict[str, float]] = {}
    range: _Range


class _File(_Part):
    format: Literal[1]
    source: str
    specification_spread: dict[str, float] = {}
    groups: tuple[_Group, ...]
    accelerators: tuple[AcceleratorProfile, ...] = ()
    models: tuple[ModelProfile, ...] = ()
    """Profiles of one's own, which no name stands for."""


def dump(calibration: Calibration, catalog: Catalog) -> str:
    """The same text for the same calibration, on any machine. Profiles that `catalog` does not give by their names
    go into it."""
    groups = [_group(each) for each in sorted(calibration.fits, key=lambda each: each.key)]
    content = {
        "format": 1,
        "source": calibration.source,
        "specification_spread": _rounded(calibration.specification_spread),
        "groups": groups,
        **_own_profiles(calibration, catalog),
    }
    return yaml.safe_dump(content, sort_keys=False, width=120)


def load(text: str, catalog: Catalog, where: str) -> Calibration:
    """Raises `ConfigInvalid` naming the field that is wrong, or the profile that is not known."""
    try:
        content = _File.model_validate(load_yaml(text, where))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigInvalid(
            f"{where} holds no constants: {field or 'the whole'}",
            why=first["msg"],
            todo="write such a file with `isthmus calibrate --out`",
        ) from error
    names = _with_own(catalog, content)
    fits = tuple(_fit(each, content.source, names, where) for each in content.groups)
    return Calibration(content.source, fits, content.specification_spread)


def _own_profiles(calibration: Calibration, catalog: Catalog) -> dict[str, Any]:
    subjects = [each.subject for each in sorted(calibration.fits, key=lambda each: each.key)]
    accelerators = {each.accelerator.name: each.accelerator for each in subjects}
    models = {each.model.name: each.model for each in subjects}
    own: dict[str, list[Any]] = {
        "accelerators": [each for each in accelerators.values() if not _named(catalog.accelerator, each)],
        "models": [each for each in models.values() if not _named(catalog.model, each)],
    }
    return {kind: [_plain(each) for each in profiles] for kind, profiles in own.items() if profiles}


def _plain(value: Any) -> Any:
    """A profile's fields as YAML has them."""
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, str) else value


def _named(find: Callable[[str], Any], profile: AcceleratorProfile | ModelProfile) -> bool:
    """Whether its name leads to it."""
    try:
        return bool(find(profile.name) == profile)
    except ConfigInvalid:
        return False


def _with_own(catalog: Catalog, content: _File) -> Catalog:
    accelerators = {each.name: each for each in content.accelerators}
    models = {each.name: each for each in content.models}
    return Catalog(
        lambda name: accelerators[name] if name in accelerators else catalog.accelerator(name),
        lambda name: models[name] if name in models else catalog.model(name),
    )


def _group(fit: GroupFit) -> dict[str, Any]:
    return {
        **fit.key._asdict(),
        "points": fit.points,
        "constants": _rounded({name: getattr(fit.constants, name) for name in NAMES}),
        "spread": _rounded(fit.constants.spread),
        "errors": {kind: _rounded(errors) for kind, errors in fit.errors.items()},
        "range": {
            "accelerators": list(fit.range.accelerators),
            **{
                name: list(_rounded(dict(enumerate(getattr(fit.range, name)))).values())
                for name in ("concurrency", "isl_tokens", "osl_tokens")
            },
        },
    }


def _fit(group: _Group, source: str, catalog: Catalog, where: str) -> GroupFit:
    unknown = sorted(set(group.constants) ^ set(NAMES))
    if unknown:
        raise ConfigInvalid(
            f"{where}: the constants of {group.accelerator} {group.model} lack or add {', '.join(unknown)}",
            todo="calibrate anew with this version",
        )
    accelerator, model = catalog.accelerator(group.accelerator), catalog.model(group.model)
    key = GroupKey(
        accelerator.name, model.name, group.framework, group.precision, group.dp_attention, group.expert_parallel
    )
    constants = Constants(
        **group.constants,
        source=f"{group.points} measurements of {key} ({source})",
        calibrated=True,
        spread=group.spread,
    )
    measured = Range(**group.range.model_dump())
    return GroupFit(Subject(key, accelerator, model), group.points, constants, measured, group.errors)


def _rounded(values: Mapping[Any, float]) -> dict[Any, float]:
    return {name: float(f"{value:.{DIGITS}g}") for name, value in values.items()}
