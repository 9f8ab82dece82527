"""What happened in a simulation, in order, so that a failed seed can be read and two runs of one be compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

from isthmus_sim.loop import current_process, world_loop

_RANDOM_ID = re.compile(r"(req|xfer)-[A-Za-z0-9_-]{12}(~[A-Za-z0-9_-]{8})?")
"""The ingress draws them; two runs of one seed differ in nothing else."""


class Trace:
    """Events with their virtual time. Also a structlog processor: the services' own log becomes part of it."""

    def __init__(self) -> None:
        self._events: list[tuple[float, str, str, Mapping[str, object]]] = []

    def note(self, who: str, what: str, /, **facts: object) -> None:
        self._events.append((world_loop().world_s, who, what, facts))

    def __call__(self, logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        facts = dict(event)
        self.note(current_process(), str(facts.pop("event")), **facts)
        raise structlog.DropEvent

    def lines(self) -> list[str]:
        """Random ids are numbered in order of appearance."""
        names: dict[str, str] = {}

        def name(match: re.Match[str]) -> str:
            return names.setdefault(match[0], f"{match[1]}-{len(names) + 1}")

        return [_RANDOM_ID.sub(name, _line(*event)) for event in self._events]


def _line(at_s: float, who: str, what: str, facts: Mapping[str, object]) -> str:
    said = " ".join(f"{key}={_text(value)}" for key, value in facts.items())
    return f"{at_s:10.6f}  {who:<12} {what}  {said}".rstrip()


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value.hex() if isinstance(value, bytes) else str(value)
