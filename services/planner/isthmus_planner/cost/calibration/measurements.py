"""Benchmark rows as they are published, and which of them say something about an aggregated replica. Pure.

Columns follow InferenceMAX's; what a file lacks is taken as absent, and times may be given in milliseconds.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from isthmus_planner.cost import memory
from isthmus_planner.cost.constants import Constants
from isthmus_planner.cost.laws import decode_law, prefill_law
from isthmus_planner.cost.layout import Layout, Precision
from isthmus_planner.cost.profiles import AcceleratorProfile, ModelProfile
from isthmus_shared.errors import ConfigInvalid

LENGTH_RATIO = 0.9
"""InferenceMAX draws lengths evenly between 0.8 and 1 of the nominal ones."""
MAX_ROWS = 100_000
"""A measurement campaign has thousands; a fit is made of hundreds."""
LEAST, MOST = 1e-9, 1e9
"""Of any cell: seconds, tokens, clients, tokens per second. Beyond is a slip of the pen."""
MAX_STEADY_SHARE, MAX_DECODE_SHARE = 1.5, 1.5
"""Little's law gives at most 1, and a request at least the time of its tokens; the rest is for medians and means."""
NEEDED = ("accelerator", "model", "concurrency", "isl", "osl")
TIMES = ("itl", "tpot", "ttft", "e2el")
ENGINES = {"trtllm": "trt", "trt-llm": "trt", "tensorrt-llm": "trt"}
PRECISIONS = {"mxfp4": "fp4", "nvfp4": "fp4", "fp16": "bf16", "bfloat16": "bf16"}
"""Names that others give to engines and precisions."""
TRUE, FALSE = {"true", "1", "yes"}, {"false", "0", "no", ""}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row. Times in seconds, NaN where not measured; lengths in real tokens."""

    line: int
    accelerator: AcceleratorProfile
    model: ModelProfile
    framework: str
    layout: Layout
    concurrency: float
    isl_tokens: float
    osl_tokens: float
    itl_s: float
    """Median time between two messages of a stream. An engine may put several tokens into one."""
    tpot_s: float
    ttft_s: float
    e2el_s: float
    output_tok_per_s: float
    """Of the whole replica."""
    ttft_p99_s: float = math.nan

    @property
    def steady_share(self) -> float:
        """Measured throughput over the one that Little's law gives for the measured latency. Well below 1: the run
        stood still for a while (compilation, say), so its throughput is not the steady state's. NaN: unknown."""
        return self.output_tok_per_s * self.e2el_s / (self.concurrency * self.osl_tokens)


class WrongCell(ConfigInvalid):
    """A cell that is not what its column holds."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    line: int
    why: str


@dataclass(frozen=True, slots=True)
class Catalog:
    """How names become profiles; each raises `ConfigInvalid` for a name that it does not know."""

    accelerator: Callable[[str], AcceleratorProfile]
    model: Callable[[str], ModelProfile]


def parse(
    text: str, catalog: Catalog, *, length_ratio: float = LENGTH_RATIO
) -> tuple[tuple[Measurement, ...], tuple[LeftOut, ...]]:
    """Rows that can be used, and the others with the reason.

    Raises `ConfigInvalid` when the file is no such table, or a number in it is none (naming line and column).
    """
    if not 0 < length_ratio <= 2:
        raise ConfigInvalid(f"a length ratio of {length_ratio:g}", todo="give real over nominal length, such as 0.9")
    reader = csv.DictReader(io.StringIO(text))
    try:
        header = [name.strip() for name in reader.fieldnames or ()]
    except csv.Error as error:
        raise ConfigInvalid("the first line is no CSV", why=str(error), todo="give comma-separated text") from error
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise ConfigInvalid(f"two columns are named {twice[0]}", todo="give each its own name", param=twice[0])
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise ConfigInvalid(
            f"the measurements have no column {', '.join(missing)}",
            why=f"the first line has {', '.join(header) or 'nothing'}",
            todo="name the columns as docs/cost-model.md does",
            param=missing[0],
        )
    if not any(_column(header, name) for name in TIMES):
        raise ConfigInvalid(
            "the measurements have no latency", todo="give at least one of " + ", ".join(f"{t}_s_p50" for t in TIMES)
        )
    used: list[Measurement] = []
    left_out: list[LeftOut] = []
    for row in _rows(reader):
        if len(used) + len(left_out) >= MAX_ROWS:
            raise ConfigInvalid(f"more than {MAX_ROWS} measurements", todo="split the file")
        cells = {(key or "").strip(): value.strip() for key, value in row.items() if isinstance(value, str)}
        parsed = _measurement(_Row(reader.line_num, cells), header, catalog, length_ratio)
        (used if isinstance(parsed, Measurement) else left_out).append(parsed)  # type: ignore[arg-type]
    return tuple(used), tuple(left_out)


def _rows(reader: csv.DictReader[str]) -> Iterator[dict[str, str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise ConfigInvalid(
            f"line {reader.line_num} is no CSV", why=str(error), todo="give comma-separated text"
        ) from error


class _Row:
    def __init__(self, line: int, cells: Mapping[str, str]) -> None:
        self.line, self.cells = line, cells

    def number(self, name: str | None, *, default: float = math.nan) -> float:
        """Positive and finite, or the default where the cell is empty."""
        text = self.cells.get(name or "", "")
        if not text or text.lower() in ("nan", "null", "none"):
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise self.wrong(name, text, "a positive number")
        if not LEAST <= value <= MOST:
            raise self.wrong(name, text, f"{LEAST:g} to {MOST:g}, in the unit of the column's name")
        return value

    def count(self, name: str, *, default: int | None = None) -> int:
        value = self.number(name, default=math.nan if default is None else default)
        if value != int(value if math.isfinite(value) else 0):
            raise self.wrong(name, self.cells.get(name, ""), "a whole number of at least 1")
        return int(value)

    def flag(self, name: str) -> bool:
        text = self.cells.get(name, "").lower()
        if text not in TRUE | FALSE:
            raise self.wrong(name, text, "true or false")
        return text in TRUE

    def wrong(self, name: str | None, text: str, wanted: str) -> WrongCell:
        return WrongCell(f"line {self.line}: {name} is {text!r}", todo=f"give {wanted}", param=name)


def _column(header: Iterable[str], quantity: str) -> str | None:
    """The column of a time: median before mean, seconds before milliseconds."""
    names = (f"{quantity}_s_p50", f"{quantity}_s", f"{quantity}_ms_p50", f"{quantity}_ms")
    return next((name for name in names if name in header), None)


def _measurement(row: _Row, header: list[str], catalog: Catalog, length_ratio: float) -> Measurement | LeftOut:
    for flag, why in (
        ("disagg", "is disaggregated: two replicas and a transfer, which the simulator covers"),
        ("is_multinode", "spans nodes: the fabric between them has no figure in a profile"),
    ):
        if row.flag(flag):
            return LeftOut(row.line, why)
    try:
        framework, accelerator = _accelerator(row, catalog)
        model = catalog.model(row.cells.get("model", ""))
        layout = _layout(row)
        # Whatever a law needs and the profiles do not tell would stop every fit later.
        decode_law(accelerator, model, layout, Constants())
        prefill_law(accelerator, model, layout, Constants())
        memory.fit(accelerator, model, layout, utilisation=1.0, reserve_bytes=0.0)
    except WrongCell:
        raise
    except ConfigInvalid as error:
        return LeftOut(row.line, error.what)
    times = {name: _time(row, header, name) for name in TIMES}
    if not any(math.isfinite(value) for value in times.values()):
        return LeftOut(row.line, "has no latency")
    isl, osl = row.number("isl"), row.number("osl")
    concurrency = row.number("concurrency")
    if not math.isfinite(isl + osl + concurrency):
        return LeftOut(row.line, "has no concurrency, isl or osl")
    isl = row.number("isl_mean", default=isl * length_ratio)
    osl = row.number("osl_mean", default=osl * length_ratio)
    measured = Measurement(
        line=row.line,
        accelerator=accelerator,
        model=model,
        framework=framework,
        layout=layout,
        concurrency=concurrency,
        isl_tokens=isl,
        osl_tokens=osl,
        itl_s=times["itl"],
        tpot_s=times["tpot"],
        ttft_s=times["ttft"],
        e2el_s=times["e2el"],
        output_tok_per_s=_throughput(row, isl, osl) * layout.accelerators,
        ttft_p99_s=row.number("ttft_s_p99"),
    )
    why = _contradiction(measured)
    return LeftOut(row.line, why) if why else measured


def _contradiction(row: Measurement) -> str:
    """Why two figures of a row cannot both be true, as when one has another unit than its column's name tells."""
    if row.steady_share > MAX_STEADY_SHARE:
        return "has more throughput than its clients and latency allow (units? per accelerator? tp?)"
    if row.tpot_s * row.osl_tokens > MAX_DECODE_SHARE * row.e2el_s:
        return "has a time per token that its end-to-end latency leaves no room for (units?)"
    if row.ttft_s > MAX_DECODE_SHARE * row.e2el_s:
        return "has a first token long after its end (units?)"
    return ""


def _accelerator(row: _Row, catalog: Catalog) -> tuple[str, AcceleratorProfile]:
    """`b200-trt` is a B200 under `trt`, where no accelerator has the whole name."""
    name, framework = row.cells.get("accelerator", ""), row.cells.get("framework", "").lower()
    framework = ENGINES.get(framework, framework)
    try:
        return framework, catalog.accelerator(name)
    except ConfigInvalid:
        head, dash, tail = name.rpartition("-")
        if not dash:
            raise
        return framework or ENGINES.get(tail.lower(), tail.lower()), catalog.accelerator(head)


def _layout(row: _Row) -> Layout:
    accelerators, ep = row.count("tp", default=1), row.count("ep", default=1)
    precision = row.cells.get("precision", "").lower()
    precision = PRECISIONS.get(precision, precision)
    if precision and precision not in set(Precision):
        raise row.wrong("precision", precision, ", ".join(Precision))
    weights = Precision(precision) if precision else None
    if row.flag("dp_attention"):
        return Layout(tp=1, dp=accelerators, ep=ep, weights=weights)
    return Layout(tp=accelerators, ep=ep, weights=weights)


def _time(row: _Row, header: list[str], quantity: str) -> float:
    name = _column(header, quantity)
    return row.number(name) * (1e-3 if name and "_ms" in name else 1.0)


def _throughput(row: _Row, isl: float, osl: float) -> float:
    """Output tokens per second and accelerator; from the total where only that is given."""
    output = row.number("output_tok_per_s_per_gpu")
    return output if math.isfinite(output) else row.number("total_tok_per_s_per_gpu") * osl / (isl + osl)
