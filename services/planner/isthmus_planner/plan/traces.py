"""Lengths of a trace's requests: Mooncake's JSON lines and Azure's LLM-inference CSV, of any size in flat memory."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from isthmus_planner.plan.mix import Kind
from isthmus_planner.sim.workload import Lengths
from isthmus_shared.errors import ConfigInvalid

MAX_SAMPLES = 100_000
"""Of a longer trace every second, fourth, ... request is kept: enough for its quantiles."""
MOONCAKE_FIELDS = ("input_length", "output_length")
AZURE_FIELDS = ("ContextTokens", "GeneratedTokens")


def trace_kind(path: Path) -> Kind:
    """Its requests as one kind. Raises `ConfigInvalid` naming the line that is none."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            pairs = _sampled(_mooncake(path, file) if path.suffix == ".jsonl" else _azure(path, file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"the trace {path} cannot be read", why=str(error), todo="give a readable file") from error
    if not pairs:
        raise ConfigInvalid(f"the trace {path} is empty", todo="give one with at least one request")
    return Kind("trace", 1.0, Lengths.of([isl for isl, _ in pairs]), Lengths.of([osl for _, osl in pairs]))


def _sampled(requests: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    stride = 1
    for index, request in enumerate(requests):
        if index % stride:
            continue
        kept.append(request)
        if len(kept) >= MAX_SAMPLES:
            kept = kept[::2]
            stride *= 2
    return kept


def _mooncake(path: Path, file: TextIO) -> Iterator[tuple[int, int]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigInvalid(f"{path}:{number}: not JSON", todo="one object a line, as Mooncake's traces") from error
        yield _pair(path, number, record, MOONCAKE_FIELDS)


def _azure(path: Path, file: TextIO) -> Iterator[tuple[int, int]]:
    reader = csv.DictReader(file)
    try:
        for record in reader:
            yield _pair(path, reader.line_num, record, AZURE_FIELDS)
    except csv.Error as error:
        raise ConfigInvalid(f"{path}:{reader.line_num}: not CSV", why=str(error)) from error


def _pair(path: Path, number: int, record: object, names: tuple[str, str]) -> tuple[int, int]:
    found = []
    for name in names:
        value = record.get(name) if isinstance(record, dict) else None
        try:
            tokens = int(str(value))
        except ValueError:
            tokens = 0
        if tokens < 1:
            raise ConfigInvalid(
                f"{path}:{number}: {name} is {value!r}",
                todo=f"each request needs {' and '.join(names)}, whole numbers of at least 1",
            )
        found.append(tokens)
    return found[0], found[1]
