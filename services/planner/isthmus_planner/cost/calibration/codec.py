"""A calibration as YAML text and back. Pure: files are the caller's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isthmus_planner.cost.calibration.groups import GroupKey, Subject
from isthmus_planner.cost.calibration.measurements import Catalog
from isthmus_planner.cost.calibration.parameters import NAMES
from isthmus_planner.cost.calibration.store import Calibration, GroupFit, Range
from isthmus_planner.cost.constants import Constants
from isthmus_shared.errors import ConfigInvalid

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


def dump(calibration: Calibration) -> str:
    """The same text for the same calibration, on any machine."""
    groups = [_group(each) for each in sorted(calibration.fits, key=lambda each: each.key)]
    content = {
        "format": 1,
        "source": calibration.source,
        "specification_spread": _rounded(calibration.specification_spread),
        "groups": groups,
    }
    return yaml.safe_dump(content, sort_keys=False, width=120)


def load(text: str, catalog: Catalog, where: str) -> Calibration:
    """Raises `ConfigInvalid` naming the field that is wrong, or the profile that is not known."""
    try:
        content = _File.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigInvalid(f"{where} is not YAML", why=" ".join(str(error).split())) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigInvalid(
            f"{where} holds no constants: {field or 'the whole'}",
            why=first["msg"],
            todo="write such a file with `isthmus calibrate --out`",
        ) from error
    fits = tuple(_fit(each, content.source, catalog, where) for each in content.groups)
    return Calibration(content.source, fits, content.specification_spread)


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
