"""SLO classes: what requests are promised, by name.

A file of JSON lines, one class a line:

    {"name": "interactive", "ttft_s": 0.5, "itl_s": 0.05, "priority": 10}
    {"name": "batch", "priority": -10}

A request names its class (`slo_class` in its body, or the header `x-isthmus-slo-class`); else it has that of its key,
else the first one of the file that says `"default": true`, else none. A key's class bounds what its requests may name:
none of a higher priority.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isthmus_shared.errors import ConfigInvalid, InvalidRequest
from isthmus_shared.messages.route import Slo

HEADER = "x-isthmus-slo-class"
BODY_FIELD = "slo_class"
MAX_CLASSES = 256
"""Of one ingress: names for people to choose from."""
MAX_FILE_BYTES = 256 * 1024
MAX_NAME = 64


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    ttft_s: float | None = Field(default=None, gt=0, le=3600, allow_inf_nan=False)
    itl_s: float | None = Field(default=None, gt=0, le=3600, allow_inf_nan=False)
    priority: int = Field(default=0, ge=-100, le=100)
    default: bool = False


@dataclass(frozen=True, slots=True)
class SloClasses:
    by_name: Mapping[str, Slo] = field(default_factory=dict)
    default: Slo | None = None

    def of(self, asked: str, own: str, *, keyed: bool = True) -> Slo | None:
        """`asked`: what the request names, `own`: its key's; empty: none. `keyed`: whether it came with a key, which
        bounds what it may ask for: by its own class, else by the default one, else by priority 0.

        `InvalidRequest`: it may not have that.
        """
        mine = self.by_name.get(own, self.default)
        if not asked:
            return mine
        wanted = self.by_name.get(asked)
        if wanted is None:
            names = ", ".join(sorted(self.by_name)) or "none is set up"
            raise InvalidRequest(f"{asked[:MAX_NAME]!r} is no SLO class", why=f"known: {names}", param=BODY_FIELD)
        most = 0 if mine is None else mine.priority
        if keyed and wanted.priority > most:
            whose = "its own class" if own else "the class of a key that has none"
            raise InvalidRequest(
                f"this key may not ask for the class {asked!r}",
                why=f"{whose} has priority {most}, that one {wanted.priority}",
                param=BODY_FIELD,
            )
        return wanted

    def check_names(self, tenants: Iterable[tuple[str, str]]) -> None:
        """(tenant, class). `ConfigInvalid`: a tenant has a class that does not exist."""
        for tenant, name in tenants:
            if name and name not in self.by_name:
                raise ConfigInvalid(
                    f"tenant {tenant!r} has the SLO class {name!r}, which does not exist",
                    todo="add it to the file of ISTHMUS_INGRESS_SLO_CLASSES, or take it out of the tenant's line",
                    param="ISTHMUS_INGRESS_SLO_CLASSES",
                )


def with_header(body: Mapping[str, Any], header: str | None) -> Mapping[str, Any]:
    """The body's own word goes before the header's."""
    return body if not header or BODY_FIELD in body else {**body, BODY_FIELD: header}


def parse_classes(text: str, name: str) -> SloClasses:
    """Raises `ConfigInvalid` naming the line and what is wrong."""
    found: dict[str, Slo] = {}
    default: Slo | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        made = _line(line, f"{name}:{number}")
        if made.name in found:
            raise _invalid(f"{name}:{number}", f"the class {made.name!r} is named twice")
        if len(found) == MAX_CLASSES:
            raise _invalid(f"{name}:{number}", f"more than {MAX_CLASSES} classes")
        slo = Slo(name=made.name, ttft_s=made.ttft_s, itl_s=made.itl_s, priority=made.priority)
        found[made.name] = slo
        default = slo if made.default and default is None else default
    return SloClasses(found, default)


def read_classes(path: Path | None) -> SloClasses:
    """Raises `ConfigInvalid`, also when the file cannot be read. None: there are no classes."""
    if path is None:
        return SloClasses()
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigInvalid(
            f"the SLO classes in {path} cannot be had", why=why, param="ISTHMUS_INGRESS_SLO_CLASSES"
        ) from None
    return parse_classes(text, path.name)


def _line(line: str, where: str) -> _Line:
    try:
        return _Line.model_validate(json.loads(line))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        named = ".".join(str(part)[:MAX_NAME] for part in first["loc"])
        raise _invalid(where, f"{named}: {first['msg']}" if named else first["msg"]) from None
    except (ValueError, RecursionError):
        raise _invalid(where, "not JSON") from None


def _invalid(where: str, why: str) -> ConfigInvalid:
    todo = "one JSON object a line: name, ttft_s, itl_s, priority, default (docs/admission.md)"
    return ConfigInvalid(f"{where} is no SLO class", why=why, todo=todo, param="ISTHMUS_INGRESS_SLO_CLASSES")
