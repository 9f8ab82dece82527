"""Two public trace formats, line by line into batches: memory is one batch's, however long the trace.

Mooncake (FAST 2025 artifact; kvcache-ai/Mooncake): JSON lines `{"timestamp": ms, "input_length": tokens,
"output_length": tokens, "hash_ids": [one for each 512 tokens of the prompt]}`.
Azure LLM inference (Azure/AzurePublicDataset, 2023 and 2024): CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from isthmus_planner.sim.hardware import ScenarioError
from isthmus_planner.sim.trace_batch import TraceBatch

BATCH_REQUESTS = 8192
"""A few megabytes with the block hashes of long prompts."""
MOST_TOKENS = 100_000_000
"""Of one request; beyond it a column was mistaken for another."""
MOST_HASH = 2**62
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SHOWN_CHARACTERS = 60
"""Of a bad line, in its error."""


class TraceError(ScenarioError):
    """A line that is none. The message names it by its number, from 1 on."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"trace, line {line}: {why}")
        self.line = line


class _Batch:
    """Collects requests, and checks what both formats have in common."""

    def __init__(self) -> None:
        self._at_s: list[float] = []
        self._isl: list[int] = []
        self._osl: list[int] = []
        self._blocks: list[list[int]] = []
        self._last_s = 0.0

    def add(self, line: int, at_s: float, isl: int, osl: int, blocks: list[int]) -> None:
        for name, tokens in (("input", isl), ("output", osl)):
            if not 1 <= tokens <= MOST_TOKENS:
                raise TraceError(line, f"an {name} of {tokens} tokens; give 1 to {MOST_TOKENS}, or leave the line out")
        if not at_s >= self._last_s:
            raise TraceError(line, f"{at_s:g} s after the start comes after {self._last_s:g} s; sort the trace by time")
        self._last_s = at_s
        self._at_s.append(at_s)
        self._isl.append(isl)
        self._osl.append(osl)
        self._blocks.append(blocks)

    def __len__(self) -> int:
        return len(self._at_s)

    def take(self) -> TraceBatch:
        batch = TraceBatch.of(self._at_s, self._isl, self._osl, self._blocks)
        self._at_s, self._isl, self._osl, self._blocks = [], [], [], []
        return batch


def read_mooncake(lines: Iterable[str]) -> Iterator[TraceBatch]:
    """Raises TraceError at the first line that is not one of the format; blank lines don't count."""
    batch, first_ms = _Batch(), None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _json_object(number, line)
        at_ms = record.get("timestamp")
        if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not abs(at_ms) < MOST_HASH:
            raise TraceError(number, f"`timestamp` is {at_ms!r}; give milliseconds")
        if first_ms is None:
            first_ms = at_ms
        blocks = record.get("hash_ids", [])
        if not (isinstance(blocks, list) and all(type(block) is int and abs(block) < MOST_HASH for block in blocks)):
            raise TraceError(number, "`hash_ids` is not a list of whole numbers below 2^62")
        isl, osl = _whole(number, record, "input_length"), _whole(number, record, "output_length")
        batch.add(number, (at_ms - first_ms) / 1000, isl, osl, blocks)
        if len(batch) == BATCH_REQUESTS:
            yield batch.take()
    if len(batch):
        yield batch.take()


def _json_object(number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(number, f"no JSON ({error}): {line.strip()[:SHOWN_CHARACTERS]!r}") from None
    if not isinstance(record, dict):
        raise TraceError(number, f"no JSON object: {line.strip()[:SHOWN_CHARACTERS]!r}")
    return record


def _whole(number: int, record: dict[str, Any], field: str) -> int:
    value = record.get(field)
    if type(value) is not int:
        raise TraceError(number, f"`{field}` is {value!r}; give a whole number of tokens")
    return value


def read_azure(lines: Iterable[str]) -> Iterator[TraceBatch]:
    """Raises TraceError at the first line that is not one of the format; the first line names the columns."""
    rows = csv.reader(lines, strict=True)
    places = _azure_places(_next_row(rows))
    batch, first = _Batch(), None
    while (row := _next_row(rows)) is not None:
        number = rows.line_num
        if not row:
            continue
        if len(row) <= max(places):
            raise TraceError(number, f"{len(row)} columns; the first line has {', '.join(AZURE_COLUMNS)}")
        at, isl, osl = (row[place].strip() for place in places)
        try:
            moment = datetime.fromisoformat(at)
        except ValueError:
            raise TraceError(number, f"TIMESTAMP is {at[:SHOWN_CHARACTERS]!r}; give a date and time") from None
        first = moment if first is None else first
        batch.add(number, _seconds_between(number, first, moment), _tokens(number, isl), _tokens(number, osl), [])
        if len(batch) == BATCH_REQUESTS:
            yield batch.take()
    if len(batch):
        yield batch.take()


def _next_row(rows: Any) -> list[str] | None:
    try:
        return next(rows, None)
    except csv.Error as error:
        raise TraceError(rows.line_num, f"no CSV ({error})") from None


def _azure_places(header: list[str] | None) -> tuple[int, ...]:
    names = [name.strip().lstrip("\ufeff") for name in header or []]
    for name in AZURE_COLUMNS:
        if name not in names:
            raise TraceError(1, f"no column {name}; the first line must name {', '.join(AZURE_COLUMNS)}")
    return tuple(names.index(name) for name in AZURE_COLUMNS)


def _seconds_between(number: int, first: datetime, moment: datetime) -> float:
    try:
        return (moment - first) / timedelta(seconds=1)
    except TypeError:
        raise TraceError(number, "some times have a time zone and some have none; give all or none") from None


def _tokens(number: int, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise TraceError(number, f"{text[:SHOWN_CHARACTERS]!r} is no number of tokens")
    return int(text[:20])


FORMATS = {".jsonl": read_mooncake, ".csv": read_azure}
"""By the file name's ending."""


def read_trace(path: Path) -> Iterator[TraceBatch]:
    """A file in either format. ScenarioError: it cannot be read, or its name ends in neither `.jsonl` nor `.csv`."""
    read = FORMATS.get(path.suffix.lower())
    if read is None:
        raise ScenarioError(f"the trace {path} is neither .jsonl (Mooncake's format) nor .csv (Azure's)")
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            yield from read(lines)
    except UnicodeDecodeError:
        raise ScenarioError(f"the trace {path} is not UTF-8 text; unpack or convert it") from None
    except OSError as error:
        raise ScenarioError(f"the trace {path} cannot be read: {error.strerror}") from None
